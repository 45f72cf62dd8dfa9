"""Fixtures of the API tests: LLMs whose model is a script."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from nanoengine import LLM
from tests.support.fake_llm import ANSWERS, MakeLLM
from tests.support.fake_llm import make_llm_fixture as make_llm_fixture


@pytest.fixture
def llm(make_llm: MakeLLM) -> Iterator[LLM]:
    """Yields an LLM that answers each prompt with its text in ANSWERS."""
    with make_llm(ANSWERS) as llm:
        yield llm
