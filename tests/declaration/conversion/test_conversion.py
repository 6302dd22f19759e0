"""What each directive of another program becomes: the cases of the YAML files beside this one.

`text`, or `within` with the words of the case in place of those of `words`, is converted, with `addresses` as
virtual IPs. Its services are `services`, or one that `has` these keys (null: it has none). `lost` and `noted`
are the lines of the problems and notes, each with the directive, or the line alone. `says` stands in one of
them, `silent` in none. Of `lost_each` and `noted_each` every line, in place of that word, is lost, or noted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.lab.inside import Declared, Note, Problem, declare, written

FORMS = ("haproxy", "ipvsadm", "keepalived", "nginx")
Json = dict[str, Any]


def loaded(text: str) -> Any:
    return yaml.load(text, yaml.CSafeLoader)


def table(form: str) -> Json:
    read: Json = loaded(Path(__file__).with_name(f"{form}.yaml").read_text())
    return read


def text_of(form: Json, case: Mapping[str, str]) -> str:
    text: str = case.get("text", form["within"])
    for word, usual in form["words"].items():
        text = text.replace(word, case.get(word, usual))
    return text


def converted(text: str, form: str, addresses: Iterable[str] = ()) -> tuple[Declared, list[Json]]:
    """What a text becomes, and the services as they are printed, which is read back equal."""
    result = declare(text, "a", form=form, addresses=tuple(addresses))
    assert result == declare(text, "a", form="auto", addresses=tuple(addresses)), "its format is recognised"
    assert not any(problem.internal for problem in result.problems)
    printed = written(result.services)
    again = declare(printed, "printed")
    assert (again.services, again.problems) == (result.services, ())
    return result, loaded(printed)["services"] or []


def places(found: Iterable[Problem | Note], wanted: list[int | str]) -> list[int | str]:
    """Lines and directives, or the lines alone where these are wanted."""
    named = (
        (each.line, each.path if isinstance(each, Problem) else each.text.split(":")[0]) for each in found
    )
    return [line if set(map(type, wanted)) == {int} else f"{line} {name}" for line, name in named]


def differences(form: Json, case: Json, name: str) -> Json:
    """What comes out otherwise than the case says."""
    result, specs = converted(text_of(form, case), name, case.get("addresses", ()))
    if "has" in case:
        specs = [{key: spec.get(key) for key in case["has"]} for spec in specs]
    came: Json = {
        "services": specs,
        "lost": places(result.problems, case.get("lost", [])),
        "noted": places(result.notes, case.get("noted", [])),
    }
    wanted: Json = {"lost": [], "services": [case["has"]] if "has" in case else came["services"]} | case
    said = "\n".join(map(str, (*result.problems, *result.notes)))
    wrong = {key: value for key, value in came.items() if value != wanted.get(key, value)}
    if wanted.get("says", "") not in said or case.get("silent", "\0") in said:
        wrong["said"] = said
    return wrong


@pytest.mark.parametrize("name", FORMS)
def test_each_case_becomes_what_it_says(name: str) -> None:
    form = table(name)
    wrong = {case["case"]: differences(form, case, name) for case in form["cases"]}
    assert {case: parts for case, parts in wrong.items() if parts} == {}


@pytest.mark.parametrize("name", FORMS)
def test_a_line_is_lost_or_noted_and_the_service_stays(name: str) -> None:
    form, differing = table(name), []
    (plain,) = converted(text_of(form, {}), name)[0].services
    (backend,) = plain.backends
    for kind in ("lost", "noted"):
        for word, lines in form.get(f"{kind}_each", {}).items():
            (number,) = (n for n, line in enumerate(form["within"].splitlines(), 1) if word in line)
            for line in lines:
                result, _ = converted(text_of(form, {word: line}), name)
                if (
                    {problem.line for problem in result.problems} != ({number} if kind == "lost" else set())
                    or (kind == "noted" and number not in {note.line for note in result.notes})
                    or [service.name for service in result.services] != [plain.name]
                    or backend.address not in {other.address for other in result.services[0].backends}
                ):
                    differing.append((line, list(map(str, (*result.problems, *result.notes)))))
    assert differing == []
