import pytest
import yaml

from vipd.declaration import yaml_tree
from vipd.declaration.nodes import (
    Mapping,
    Node,
    Scalar,
    Sequence,
    integer,
    is_null,
    other_meaning,
    tree_from_json,
)
from vipd.declaration.yaml_tree import read_tree
from vipd.model.limits import YAML_DEPTH


def plain(node: Node) -> object:
    """The tree without lines."""
    if isinstance(node, Mapping):
        return {key: plain(value) for key, value in node.items.items()}
    if isinstance(node, Sequence):
        return [plain(item) for item in node.items]
    assert isinstance(node, Scalar)
    return node.text


def problems(text: str) -> list[str]:
    return [str(problem) for problem in read_tree(text, "x").problems]


@pytest.fixture(params=["CSafeLoader", "SafeLoader"])
def _each_parser(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(yaml, request.param):
        pytest.skip("PyYAML is built without libyaml here")
    monkeypatch.setattr(yaml_tree, "_LOADER", getattr(yaml, request.param))


@pytest.mark.usefixtures("_each_parser")
def test_nodes_know_their_lines() -> None:
    text = "# head\na: 1\nb:\n  - x\n  - {c: 'y',\n     d: *z}\n".replace("*z", '"w"')
    (document,) = read_tree(text, "x").documents
    assert isinstance(document, Mapping)
    assert document.line == 2
    assert document.key_lines == {"a": 2, "b": 3}
    items = document.items["b"]
    assert isinstance(items, Sequence)
    inner = items.items[1]
    assert isinstance(inner, Mapping)
    assert (items.line, inner.line, inner.key_lines["d"]) == (4, 5, 6)
    assert plain(document) == {"a": "1", "b": ["x", {"c": "y", "d": "w"}]}


@pytest.mark.usefixtures("_each_parser")
def test_quotes_tell_text_from_number() -> None:
    (document,) = read_tree("[53, '53', \"53\", |\n  53\n]".replace("|\n  53\n", "53"), "x").documents
    assert isinstance(document, Sequence)
    scalars = [item for item in document.items if isinstance(item, Scalar)]
    assert [integer(item) for item in scalars] == [53, None, None, 53]


@pytest.mark.usefixtures("_each_parser")
def test_each_document_has_its_own_tree_and_empty_ones_are_passed_over() -> None:
    documents = read_tree("---\na: 1\n---\n---\n# no\n---\n~\n---\n[b]\n...\n", "x").documents
    assert [plain(document) for document in documents] == [{"a": "1"}, ["b"]]


@pytest.mark.usefixtures("_each_parser")
def test_an_alias_stands_for_its_anchor_in_the_same_document() -> None:
    tree = read_tree("a: &x [1]\nb: *x\n---\nc: *x\n", "x")
    assert plain(tree.documents[0]) == {"a": ["1"], "b": ["1"]}
    assert [problem.line for problem in tree.problems] == [4]


@pytest.mark.usefixtures("_each_parser")
@pytest.mark.parametrize(
    ("text", "line", "what"),
    [
        ("a: [1", 1, "YAML syntax"),
        ("a: 1\n b: 2: 3\n", 2, "YAML syntax"),
        ("a: 1\n\tb: 2\n", 2, "YAML syntax"),
        ("a: 1\nb: \x00\n", 2, "U+0000"),
        ("a: \ud800\n", 1, "U+D800"),
        ("a: \udcff\n", 1, "byte 0xff"),
        ("a: &x [*x]", 1, "contains itself"),
        ("a: &x {b: {c: *x}}", 1, "contains itself"),
        ("[" * 100_000, 1, "levels deep"),
        ("- " * 1000, 1, "levels deep"),
        ("a: 1\nb: 2\na: 3", 3, "first on line 1"),
        ("'a': 1\n\"a\": 2", 2, "first on line 1"),
        ("a:\n  <<: {b: 1}", 2, "merge key"),
        ("a: !!int 3", 1, '"!!int"'),
        ("a: ! 3", 1, '"!"'),
        ("a: !!python/object:os.system {}", 1, "tag"),
        ("? {a: 1}\n: b", 1, "key must be text"),
    ],
)
def test_what_is_not_plain_yaml_is_a_problem_with_its_line(text: str, line: int, what: str) -> None:
    tree = read_tree(text, "x")
    assert tree.problems[0].line in {line, line + 1 if "syntax" in what else line}
    assert what in tree.problems[0].what


def test_aliases_cannot_explode() -> None:
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 30)]
    assert "aliases stand for more than" in problems("\n".join(lines))[0]


def test_an_anchor_may_be_set_again() -> None:
    (document,) = read_tree("[&x 1, *x, &x [2], *x]", "x").documents
    assert plain(document) == ["1", "1", ["2"], ["2"]]


def test_nesting_up_to_the_limit_is_read() -> None:
    assert problems("[" * YAML_DEPTH + "]" * YAML_DEPTH) == []
    assert len(problems("[" * (YAML_DEPTH + 1) + "]" * (YAML_DEPTH + 1))) == 1


def test_documents_before_a_syntax_error_are_kept() -> None:
    tree = read_tree("a: 1\n---\nb: [", "x")
    assert [plain(document) for document in tree.documents] == [{"a": "1"}]


@pytest.mark.parametrize(
    ("text", "meaning"),
    [
        ("", "null"),
        ("~", "null"),
        ("5", "an integer"),
        ("010", "octal"),
        ("0o10", "octal"),
        ("08", "leading zero"),
        ("0x10", "hexadecimal"),
        ("0b10", "binary"),
        ("53:22", "base-60"),
        ("1_000", "digit groups"),
        ("+5", "plus sign"),
        ("1e3", "floating-point"),
        ("1.", "floating-point"),
        (".5", "floating-point"),
        ("-.inf", "floating-point"),
        (".NaN", "floating-point"),
        ("yes", "a boolean in YAML 1.1"),
        ("Off", "a boolean in YAML 1.1"),
        ("True", "a boolean"),
        ("2026-11-21", "a date"),
        ("2026-11-21T10:00:00Z", "a date"),
    ],
)
def test_plain_scalars_that_are_no_text_are_explained(text: str, meaning: str) -> None:
    assert meaning in other_meaning(Scalar(1, text, plain=True))
    assert other_meaning(Scalar(1, text, plain=False)) == ""


@pytest.mark.parametrize(
    "text", ["dns", "10.96.0.10", "53/udp", "1d", "fd00::10", "-", "e3", "nowhere", "1" * 99 + "x"]
)
def test_text_is_text(text: str) -> None:
    assert other_meaning(Scalar(1, text, plain=True)) == ""


def test_huge_numbers_are_matched_in_linear_time() -> None:
    assert other_meaning(Scalar(1, "1" * 1_000_000 + "x", plain=True)) == ""
    assert integer(Scalar(1, "1" * 1_000_000, plain=True)) is None


def test_json_makes_the_same_tree() -> None:
    node = tree_from_json({"a": [1, True, None, "1", 1.5], "b": {}}, 7)
    assert plain(node) == {"a": ["1", "true", "null", "1", "1.5"], "b": {}}
    assert isinstance(node, Mapping)
    assert node.key_lines == {"a": 7, "b": 7}
    assert is_null(tree_from_json(None))
    assert not is_null(tree_from_json(""))
