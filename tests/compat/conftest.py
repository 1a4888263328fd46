"""The programs are run by the tests, each in a process of its own; they hold no tests."""

collect_ignore = ["programs"]
