import pickle
import shlex
import subprocess
from pathlib import Path

import pytest

from remit.core.errors import InvalidArgument
from remit.processes.template import CommandTemplate


def test_one_item_stays_one_argument_whatever_the_value_holds() -> None:
    template = CommandTemplate(["ruff", "check", "--fix", "{path}"])
    assert template.render({"path": "a b; rm -rf / $(x) *"}) == ["ruff", "check", "--fix", "a b; rm -rf / $(x) *"]
    assert template.fields == {"path"}


def test_a_value_is_never_read_as_a_template_again() -> None:
    assert CommandTemplate(["echo", "{a}"]).render({"a": "{b}{{"}) == ["echo", "{b}{{"]


def test_fields_mix_with_text_and_braces_are_escaped_by_doubling() -> None:
    template = CommandTemplate(["x", "--{a}={b}", "{{literal}}", "{a}{a}"])
    assert template.render({"a": "n", "b": 3}) == ["x", "--n=3", "{literal}", "nn"]


@pytest.mark.parametrize(
    ("value", "text"), [("s", "s"), (7, "7"), (0.5, "0.5"), (True, "true"), (Path("/a b"), "/a b")]
)
def test_plain_values_become_text(value: object, text: str) -> None:
    assert CommandTemplate(["x", "{v}"]).render({"v": value}) == ["x", text]


@pytest.mark.parametrize("value", [None, ["a"], {"a": 1}, b"a", object()])
def test_other_values_are_refused_by_name_and_position(value: object) -> None:
    with pytest.raises(InvalidArgument, match=r"'v' \(argument 2\)"):
        CommandTemplate(["x", "y", "{v}"]).render({"v": value})


def test_nul_is_refused_in_template_and_value() -> None:
    with pytest.raises(InvalidArgument, match=r"argument 1 .*NUL"):
        CommandTemplate(["x", "a\0b"])
    with pytest.raises(InvalidArgument, match=r"'v' \(argument 1\) holds a NUL"):
        CommandTemplate(["x", "{v}"]).render({"v": "a\0b"})


def test_missing_and_unknown_fields_are_named() -> None:
    template = CommandTemplate(["x", "{first}", "--to={second}"])
    with pytest.raises(InvalidArgument, match=r"'second' \(argument 2\)") as missing:
        template.render({"first": 1})
    assert missing.value.__dict__["missing"] == ("second",)
    with pytest.raises(InvalidArgument, match="no field 'third'; its fields are: first, second"):
        template.render({"first": 1, "second": 2, "third": 3})


@pytest.mark.parametrize("field", ["{a.b}", "{a[0]}", "{a!r}", "{a:>5}", "{}", "{0}", "{a b}", "{a", "a}", "{a:{b}}"])
def test_fields_beyond_plain_names_are_refused_when_the_template_is_made(field: str) -> None:
    with pytest.raises(InvalidArgument, match="argument 1"):
        CommandTemplate(["x", field])


@pytest.mark.parametrize("argv", [[], "", "   ", [""], [" "]])
def test_an_empty_command_is_refused(argv: list[str] | str) -> None:
    with pytest.raises(InvalidArgument, match="empty"):
        CommandTemplate(argv)


def test_items_that_are_no_texts_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"argument 1 .* must be a text, not int"):
        CommandTemplate(["x", 1])  # type: ignore[list-item]  # the mistake under test


def test_the_program_may_be_a_field_but_not_an_empty_one() -> None:
    template = CommandTemplate(["{tool}", "-x"])
    assert template.render({"tool": "ruff"}) == ["ruff", "-x"]
    with pytest.raises(InvalidArgument, match="program's name is empty"):
        template.render({"tool": ""})


def test_a_value_with_a_leading_dash_is_allowed_and_stays_one_item() -> None:
    assert CommandTemplate(["rm", "--", "{p}"]).render({"p": "-rf /"}) == ["rm", "--", "-rf /"]


def test_a_single_text_is_split_by_the_rules_of_the_shell() -> None:
    assert CommandTemplate("grep -n 'a b' {path}").render({"path": "x y"}) == ["grep", "-n", "a b", "x y"]
    with pytest.raises(InvalidArgument, match="does not split"):
        CommandTemplate("grep 'a")


@pytest.mark.parametrize("value", ["a b", "'; touch gone; '", "$(touch gone)", "`x`", "-n", "", "a\nb", "*"])
def test_with_a_shell_every_value_is_one_quoted_word(value: str, tmp_path: Path) -> None:
    argv = CommandTemplate("printf '<%s>' {v} | cat", shell=True).render({"v": value})
    assert argv[:2] == ["/bin/sh", "-c"]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path, check=True, timeout=10)
    assert done.stdout == f"<{value}>"
    assert not (tmp_path / "gone").exists()
    assert shlex.quote(value) in argv[2]


@pytest.mark.parametrize(
    "command",
    [
        'echo "{v}"',
        "echo '{v}'",
        'echo "$(cat "{v}")"',
        "echo `cat {v}`",
        "cat <<END\n{v}\nEND",
        r"echo \{v}",
        "true # it's {v}",
        'echo ${{HOME}} "${{x}}" {v}',
        "echo $'a' {v}",
    ],
)
def test_with_a_shell_a_field_where_quoting_does_not_hold_is_refused(command: str) -> None:
    with pytest.raises(InvalidArgument, match=r"field 'v' stands (inside|after|in) "):
        CommandTemplate(command, shell=True)


@pytest.mark.parametrize(
    "command",
    [
        "echo $(echo {v})",
        "x='it' # don't\necho {v}",
        'echo "a"{v}',
        "a#b {v}; echo {v}",
        "echo \\\\ {v}",
        "echo {v}#'x'",
    ],
)
def test_with_a_shell_a_field_in_plain_places_is_allowed(command: str) -> None:
    assert CommandTemplate(command, shell=True).fields == {"v"}


def test_a_value_that_is_no_valid_unicode_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="no valid Unicode"):
        CommandTemplate(["x", "{v}"]).render({"v": "\ud800"})


def test_with_a_shell_a_list_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="one text"):
        CommandTemplate(["echo", "a"], shell=True)


def test_templates_compare_by_content_and_pickle() -> None:
    for template in (CommandTemplate(["a", "{b}"]), CommandTemplate("a {b}", shell=True)):
        again = pickle.loads(pickle.dumps(template))
        assert again == template
        assert hash(again) == hash(template)
        assert again.fields == {"b"}
    assert CommandTemplate(["a"]) != CommandTemplate("a", shell=True)
