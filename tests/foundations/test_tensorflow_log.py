"""TensorFlow's first lines stay out of the user's terminal; what else it says does not."""

from __future__ import annotations

import logging
import os
import sys
import threading

import pytest

import pax_export as pax
from pax_export._foundations.tensorflow_log import is_start_line, quiet_save, quiet_start
from tests.processes import python


def test_an_export_writes_nothing_of_tensorflows(tmp_path):
    """Neither of its start, nor of its converter and the interpreter that tests a file."""
    code = (
        "import numpy as np, pax_export as pax\n"
        f"net, inputs, folder = pax.Linear(2, 3), pax.export.spec('batch, 2'), {str(tmp_path)!r}\n"
        "pax.export.to_saved_model(net, folder + '/net', inputs, validate=False)\n"
        "pax.export.to_tflite(net, folder + '/net.tflite', inputs)\n"
        "pax.export.load(folder + '/net.tflite')(np.ones((1, 2), np.float32))"
    )
    done = python("-c", code, env={"TF_CPP_MIN_LOG_LEVEL": None})
    assert [line for line in done.stderr.splitlines() if "pax_export" not in line] == []


def test_other_lines_pass(capfd):
    with quiet_start():
        os.write(2, b"I0000 00:00:1.1   9 port.cc:153] oneDNN custom operations are on.\n")
        os.write(2, b"W0000 00:00:1.1   9 bfc.cc:1] Allocator ran out of memory\n")
        print("of Python", file=sys.stderr)
    assert set(capfd.readouterr().err.splitlines()) == {
        "W0000 00:00:1.1   9 bfc.cc:1] Allocator ran out of memory",
        "of Python",
    }


def test_all_lines_pass_where_the_block_fails(capfd):
    with pytest.raises(ImportError), quiet_start():
        os.write(2, b"I0000 00:00:1.1   9 port.cc:153] why it fails\n")
        raise ImportError
    assert "why it fails" in capfd.readouterr().err


def test_only_others_pass_where_a_failing_block_tells_by_itself(capfd):
    with pytest.raises(ValueError), quiet_start(failures_tell=False):
        os.write(2, b"W0000 00:00:1.1   9 helpers.cc:364] Ignored output_format.\n")
        os.write(2, b"error: why\n")
        raise ValueError
    assert capfd.readouterr().err == "error: why\n"


def test_who_asks_for_all_lines_gets_them(capfd, monkeypatch):
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    with quiet_start():
        os.write(2, b"I0000 00:00:1.1   9 port.cc:153] a line\n")
    assert "a line" in capfd.readouterr().err


def test_a_save_names_no_place_that_is_gone_when_it_is_done(tmp_path, caplog):
    """As a notebook shows it, where TensorFlow's logger says more than warnings."""
    tf = pytest.importorskip("tensorflow")
    caplog.set_level("INFO", logger="tensorflow")
    options = {"validate": False, "card": False}
    inputs = pax.export.spec("batch, 2")
    pax.export.to_saved_model(
        pax.Linear(2, 3), tmp_path / "net", inputs, postprocess=lambda y: tf.nn.relu(y), **options
    )
    pax.export.to_tflite(pax.Linear(2, 3), tmp_path / "net.tflite", inputs, **options)
    assert [each.getMessage() for each in caplog.records if each.levelname == "INFO"] == []


def test_a_quiet_save_keeps_warnings_and_other_threads(caplog, monkeypatch):
    logger = logging.getLogger("tensorflow")
    caplog.set_level("INFO", logger="tensorflow")
    monkeypatch.delenv("TF_CPP_MIN_LOG_LEVEL", raising=False)
    with quiet_save():
        logger.info("assets")
        logger.warning("something is wrong")
        other = threading.Thread(target=lambda: logger.info("of somebody else"))
        other.start()
        other.join()
    logger.info("after it")
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "0")
    with quiet_save():
        logger.info("asked for")
    said = [each.getMessage() for each in caplog.records]
    assert said == ["something is wrong", "of somebody else", "after it", "asked for"]


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-22 15:18:16.1: I tensorflow/core/util/port.cc:113] oneDNN custom operations",
        "2026-11-22 15:18:16.5: E external/local_xla/cuda_dnn.cc:9261] Unable to register cuDNN "
        "factory: Attempting to register factory for plugin cuDNN",
        "WARNING: All log messages before absl::InitializeLog() is called are written to STDERR",
        "E0000 00:00:1795360691.4    9598 cuda_platform.cc:52] failed call to cuInit: INTERNAL",
        "W0000 00:00:17954221.5   20897 tf_tfl_flatbuffer_helpers.cc:364] Ignored output_format.",
        "INFO: Created TensorFlow Lite XNNPACK delegate for CPU.",
    ],
)
def test_lines_of_old_and_new_releases(line):
    assert is_start_line(line)


@pytest.mark.parametrize(
    "line",
    [
        "2026-11-22 15:18:16.1: W tensorflow/core/framework/cpu_allocator_impl.cc:83] Allocation",
        "Traceback (most recent call last):",
        "I am a line of the user's",
        "2026-11-22 15:18:16.1: F tensorflow/core/platform/env.cc:1] Check failed",
    ],
)
def test_lines_that_matter(line):
    assert not is_start_line(line)
