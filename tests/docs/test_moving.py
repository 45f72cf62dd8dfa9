"""Executes every row of the tables of docs/moving_from_vllm.md; no name may be missing."""

from __future__ import annotations

import dataclasses
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

import nanoengine
from nanoengine import (
    LLM,
    BeamSearchParams,
    NanoEngineError,
    SamplingParams,
    StructuredOutputs,
)
from nanoengine.as_vllm.params import NATIVE
from nanoengine.assets import demo_model_path
from nanoengine.checkpoint.find import resolve_memory
from nanoengine.settings import vllm_names
from nanoengine.settings.config import EngineConfig
from nanoengine.settings.vllm_names import NAMES

PAGE = (Path(__file__).parents[2] / "docs" / "moving_from_vllm.md").read_text(encoding="utf-8")


class Row(NamedTuple):
    code: str
    kind: str
    meaning: str


def rows(section: str) -> list[Row]:
    """Returns the rows of a section's tables (one table per kind). A row that lists several names
    becomes one row per name."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    kind, found = "", []
    for line in text.splitlines():
        if head := re.match(r"\| (same|alias|differs|no effect|refused) \| [a-z ]+ \|$", line):
            kind = head[1]
        elif line.startswith("| "):
            row = re.match(r"\| `(.*?)` \| (.*?) ?\|$", line)
            assert row is not None, f"not a row of a table: {line}"
            found += [Row(code, kind, row[2]) for code in row[1].split("`, `")]
    assert len(found) > 4
    return found


def parse_keywords(code: str) -> dict[str, Any]:
    """Parses `name=value, ...`."""
    return eval(f"dict({code})")


def make_config(**options: Any) -> EngineConfig:
    """Builds a config with GPU defaults."""
    config = EngineConfig.from_kwargs(**{"model": "m"} | options)
    return resolve_memory(config, torch.device("cuda"))


def make_beams(**options: Any) -> BeamSearchParams:
    return BeamSearchParams(**{"beam_width": 1, "max_tokens": 1} | options)


def make_structured_outputs(**options: Any) -> StructuredOutputs:
    constraints = options.keys() & {"regex", "choice", "grammar", "json_object"}
    return StructuredOutputs(**({} if constraints else {"json": "{}"}) | options)


SETTINGS: dict[str, tuple[Any, vllm_names.Table]] = {
    "Arguments of LLM": (make_config, vllm_names.LLM_OPTIONS),
    "SamplingParams": (SamplingParams, vllm_names.SAMPLING_PARAMS),
    "BeamSearchParams": (make_beams, NAMES["BeamSearchParams"]),
    "StructuredOutputsParams": (make_structured_outputs, NAMES["StructuredOutputsParams"]),
}


def row_params(sections: Mapping[str, Any]) -> list[Any]:
    return [pytest.param(s, row, id=f"{s}-{row.code}") for s in sections for row in rows(s)]


@pytest.mark.parametrize(("section", "row"), row_params(SETTINGS))
def test_a_setting_has_the_effect_that_the_page_states(section: str, row: Row) -> None:
    make, table = SETTINGS[section]
    options = parse_keywords(row.code)
    (name,) = options
    meaning = table.get(name, {})
    reason = meaning.get("refused") or meaning.get("no effect")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if row.kind == "refused":
            with pytest.raises(NanoEngineError) as refused:
                make(**options)
            assert (reason or name) in str(refused.value)
            assert reason is None or reason.startswith(row.meaning)
            return
        settings = make(**options)
    assert bool(caught) == (row.kind == "no effect")
    match row.kind:
        case "same":
            value, given = getattr(settings, name), options[name]
            expected = tuple(given) if isinstance(given, list) else given
            assert value in (expected, (given,))
        case "alias":
            equivalent = re.match(r"`(.*?)`", row.meaning)
            assert equivalent is not None
            assert settings == make(**parse_keywords(equivalent[1]))
        case "no effect":
            assert settings == make()
            assert name in str(caught[0].message)
            assert reason is None or reason == row.meaning
        case _:
            raise AssertionError(f"unknown word {row.kind!r}")


@pytest.mark.parametrize("section", SETTINGS)
def test_the_page_lists_every_name_of_the_table(section: str) -> None:
    _, table = SETTINGS[section]
    shown = {(name, row.kind) for row in rows(section) for name in parse_keywords(row.code)}
    for name, meaning in table.items():
        kinds = {"alias", "no effect", "refused"} & meaning.keys()
        kinds |= {"no effect"} if "reported" in meaning else set()
        assert all((name, kind) in shown for kind in kinds)


@pytest.mark.parametrize(
    ("section", "settings", "extra_fields"),
    [("SamplingParams", SamplingParams, set(NATIVE)),
     ("BeamSearchParams", BeamSearchParams, {"early_stopping"})],
)  # fmt: skip
def test_fields_are_in_the_order_of_the_page(
    section: str, settings: Any, extra_fields: set[str]
) -> None:
    same = dict.fromkeys(
        n for row in rows(section) if row.kind == "same" for n in parse_keywords(row.code)
    )
    fields = [field.name for field in dataclasses.fields(settings)]
    assert [name for name in fields if name not in extra_fields][: len(same)] == list(same)
    assert same.keys() == set(fields) - extra_fields


# --- calls and attributes -------------------------------------------------------------------------


@pytest.fixture(scope="module")
def names() -> Iterator[dict[str, Any]]:
    """Yields the variables that code on the page may use."""
    params = SamplingParams(max_tokens=2, logprobs=1)
    with LLM(demo_model_path(), max_num_seqs=8, num_kv_blocks=64) as llm:
        (output,) = llm.generate("Once", params, use_tqdm=False)
        (beams,) = llm.beam_search("Once", BeamSearchParams(2, 4), use_tqdm=False)
        yield {
            "llm": llm,
            "params": params,
            "talk": [{"role": "user", "content": "Tell a story."}],
            "output": output,
            "beam": beams.sequences[0],
            "numpy": numpy,
            "BeamSearchParams": BeamSearchParams,
            "SamplingParams": SamplingParams,
        }


CODE_SECTIONS = ("Methods", "Outputs")


@pytest.mark.parametrize(("section", "row"), row_params(dict.fromkeys(CODE_SECTIONS)))
def test_code_has_the_effect_that_the_page_states(
    section: str, row: Row, names: dict[str, Any]
) -> None:
    assert row.kind in ("same", "differs", "refused")
    if row.kind == "refused":
        # AttributeError covers assignments to frozen objects, TypeError covers unknown arguments.
        with pytest.raises((NanoEngineError, AttributeError, TypeError)) as refused:
            eval(row.code, dict(names))
        name = row.code.removeprefix("llm.")
        if name in vllm_names.LLM_METHODS:
            assert vllm_names.LLM_METHODS[name] == row.meaning
            assert str(refused.value) == f"LLM has no {name!r}: {row.meaning}"
    else:
        eval(row.code, dict(names))


def test_the_page_lists_the_methods_that_an_llm_does_not_have(names: dict[str, Any]) -> None:
    shown = {row.code.removeprefix("llm.") for row in rows("Methods") if row.kind == "refused"}
    assert vllm_names.LLM_METHODS.keys() <= shown
    assert not hasattr(names["llm"], "encode")
    with pytest.raises(AttributeError, match=r"LLM has no 'generat'$"):
        names["llm"].generat  # noqa: B018


@pytest.mark.parametrize("row", rows("Names to import"), ids=lambda row: row.code)
def test_a_name_can_be_imported_if_the_page_says_so(row: Row) -> None:
    assert row.kind in ("same", "refused")
    assert hasattr(nanoengine, row.code) == (row.kind == "same")
