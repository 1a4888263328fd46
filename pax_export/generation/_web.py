"""``"web"``: a folder for browsers, with a page to chat on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pax_export.export.formats.onnx.web import browser, npm
from pax_export.export.formats.onnx.web.export import copy_packages, write_page
from pax_export.generation._genai import GENAI
from pax_export.generation._job import Job
from pax_export.generation._runtimes import (
    HELLO,
    Report,
    Runtime,
    chat_prompt,
    check_results,
)

_PACKAGES = {
    "onnxruntime-web": npm.ONNXRUNTIME,
    "tokenizers": npm.TOKENIZERS,
    "jinja": npm.JINJA,
}
_PURPOSE = 'generation.export(format="web")'


def _file(name: str) -> str:
    return Path(__file__).with_name("chat_page").joinpath(name).read_text(encoding="utf-8")


def _find_chromium() -> None:
    npm.check(_PACKAGES.values(), _PURPOSE)
    browser.check(_PURPOSE)


def _write(job: Job, place: Path) -> Report | Mapping[str, Any]:
    report = GENAI.write(job, place)
    assert job.tokenizer is not None
    about = {"template": job.tokenizer.chat_template, "specialTokens": job.tokenizer.special_tokens}
    data = [each.relative_to(place).as_posix() for each in sorted(place.glob("onnx/*.data"))]
    module = _file("model.js").replace(" = {};\n", f" = {json.dumps(about)};\n", 1)
    module = module.replace("DATA", json.dumps(data), 1)
    title = type(job.lm).__name__
    write_page(place, title, module, _file("model.d.ts"), page_js=_file("page.js"))
    copy_packages(place, _PACKAGES)
    return report


def _run_in_browser(
    job: Job, place: Path, calls: Mapping[str, Any], seconds: float
) -> list[list[int]]:
    """The ids that follow each prompt; texts are tokenized as in Python, or it is an error."""
    assert job.tokenizer is not None
    with browser.opened(place, _file("answer.js"), seconds=seconds) as ask:
        for text in calls["texts"]:
            ids = job.tokenizer.encode(text)
            own = [ids, job.tokenizer.decode(ids, skip_special_tokens=True)]
            check_results(job, "tokenizer", "JavaScript", own, ask({"text": text}))
        if job.tokenizer.chat_template:
            theirs = ask({"messages": HELLO})
            check_results(job, "chat template", "JavaScript", chat_prompt(job), theirs)
        asked = ({"prompt": each, "steps": calls["steps"]} for each in calls["prompts"])
        return [ask(each) for each in asked]


WEB = Runtime(
    "web", "onnxruntime-web in Chromium", (), "onnx", GENAI.check, _write, find=_find_chromium,
    run=_run_in_browser,
    level=1,  # WebAssembly multiplies integers of 8 bits seven times slower than float32
)  # fmt: skip
