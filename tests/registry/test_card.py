import re
from typing import Any

import pytest
from markdown_it import MarkdownIt

from oscar_zoo.artifact.manifest import Status
from oscar_zoo.artifact.names import ArtifactId
from oscar_zoo.artifact.specs import Score
from oscar_zoo.registry.card import BEGIN, END, is_damaged, update_card
from oscar_zoo.registry.changes import Version
from oscar_zoo.registry.index import Index, IndexEntry, Summary

HUB = "hf:org/zoo"
EMPTY = Index.empty()


def entry(name: str = "Qwen3-8B/tag", *, license: str | None = "Apache-2.0", **more: Any) -> Any:  # noqa: A002
    summary = Summary(method="oscar", format_version=1, bits_per_element=2.25, license=license)
    made = Version.of(ArtifactId.parse(name), {"k.pt": b"0123456789"}).entry()
    return made.model_copy(update={"model": "Qwen/Qwen3-8B", "summary": summary} | more)


def index(*entries: IndexEntry) -> Index:
    result = EMPTY
    for item in entries:
        result = result.with_entry(item)
    return result


def new_card(*entries: IndexEntry) -> str:
    return update_card(None, EMPTY, index(*entries), hub=HUB).decode()


def test_a_new_card_has_front_matter_a_table_and_commands_to_copy() -> None:
    score = Score(
        task="gpqa_diamond",
        value=55.56,
        kv_dtype="int2",
        reporter="upstream",
        baseline=Score(task="gpqa_diamond", value=56.67, kv_dtype="bf16", reporter="upstream"),
    )
    text = new_card(entry(scores=(score,)))
    assert text.startswith(
        "---\n# oscar-zoo:begin\npipeline_tag: text-generation\nlibrary_name: oscar-zoo\n"
        "license: apache-2.0\nbase_model:\n- Qwen/Qwen3-8B\ntags:\n- sglang\n- kv-cache\n- int2\n"
    )
    row = (
        "| Qwen/Qwen3-8B | `tag` | oscar | 1 | 2.25 | not reported | gpqa\\_diamond 55.56 (BF16"
        " 56.67), upstream | "
    )
    assert f"{row}`sha256:" in text
    assert "\noscar-zoo pull Qwen3-8B:tag --hub hf:org/zoo\noscar-zoo serve Qwen3-8B:tag\n" in text
    text = new_card(entry("tiny-qwen3-hard/tag", model="oscar-zoo/tiny-qwen3-hard"))
    assert "\noscar-zoo serve tiny-qwen3-hard:tag --model FOLDER\n```\n\nFOLDER is " in text


def test_a_score_shows_its_error_and_who_reports_it() -> None:
    measured = Score(
        task="recall",
        value=0.5,
        unit="share",
        kv_dtype="int2",
        reporter="measured",
        who="me",
        stderr=0.25,
    )
    missing = Score(task="other", value=None, kv_dtype="int2", reporter="third_party")
    text = new_card(entry(scores=(measured, missing)))
    assert "recall 0.50 ± 0.25 share, me; other not reported, a third party" in text


@pytest.mark.parametrize(
    ("licenses", "shown"),
    [
        (["MIT", "MIT"], "license: mit\n"),
        (["MIT", "Apache-2.0"], None),
        (["MIT", None], None),
        (["mine\nevil: true"], None),
    ],
)
def test_the_license_is_given_when_it_is_known_and_the_same_for_all(
    licenses: list[str | None], shown: str | None
) -> None:
    text = new_card(
        *(entry(f"m{i}/tag", model=None, license=name) for i, name in enumerate(licenses))
    )
    front = text.split("---")[1]
    assert (shown in front) if shown else "license" not in front and "evil" not in front


def test_yanked_versions_are_marked_and_never_recommended() -> None:
    yanked = Status(state="yanked", reason="wrong | data", replaced_by="b:tag")
    text = new_card(entry("a/tag", model=None, status=yanked), entry("b/tag", model=None))
    assert "yanked: wrong \\| data; use b\\:tag" in text
    assert "pull b:tag" in text and "pull a:tag" not in text
    assert "oscar-zoo pull" not in new_card(entry(status=yanked))


def test_a_card_nobody_edited_is_written_anew() -> None:
    one = entry(license="MIT")
    first, second = index(one), index(one, entry("b/tag", model=None, license=None))
    card = update_card(None, EMPTY, first, hub=HUB)
    assert b"license: mit" in card
    assert b"license" not in update_card(card, first, second, hub=HUB)


@pytest.mark.parametrize("before", [b"", b"# Mine\r\n\r\ntext \xff", b"---\nlicense: other\n---\n"])
@pytest.mark.parametrize("after", [b"", b"\r\n\r\n## More\n  "])
def test_text_outside_the_section_stays_byte_for_byte(before: bytes, after: bytes) -> None:
    card = before + BEGIN + b"old" + END + after
    changed = update_card(card, EMPTY, index(entry()), hub=HUB)
    assert changed.startswith(before + BEGIN) and changed.endswith(END + after)
    assert b"old" not in changed and b"Qwen" in changed
    assert update_card(changed, EMPTY, index(entry()), hub=HUB) == changed


@pytest.mark.parametrize("card", [BEGIN, END, END + BEGIN, BEGIN + BEGIN + END, BEGIN + END + END])
def test_damaged_markers_leave_the_card_alone(card: bytes) -> None:
    assert update_card(card, EMPTY, index(entry()), hub=HUB) == card
    assert is_damaged(card)


NASTY = [
    "a|b\n| c | d |",
    "<script>alert(1)</script>",
    "[click](https://evil.example)",
    "![x](https://evil.example/x.png)",
    "`code` **bold** __init__ ~~gone~~",
    f"{END.decode()} <!-- x",
    "&lt;b&gt; \\| \\\\",
    "https://evil.example www.evil.example me@evil.example #12 @someone $x$",
    "text \u202e\u200b\x1b[31m red",
    "x" * 4000,
]


@pytest.mark.parametrize("text", NASTY)
def test_what_a_manifest_says_stays_plain_text(text: str) -> None:
    score = Score(task=text, value=1.0, unit=text, kv_dtype="int2", reporter="measured", who=text)
    nasty = entry(
        summary=Summary(method=text, license=text),
        scores=(score,),
        status=Status(state="deprecated", reason=text, replaced_by=text),
    )
    both = index(nasty, entry("Other/tag", model=None))
    card = update_card(None, EMPTY, both, hub=HUB)
    assert (card.count(BEGIN), card.count(END)) == (1, 1)
    assert update_card(b"x" + card, EMPTY, both, hub=HUB) == b"x" + card
    assert len(re.findall(r"^\| .*$", card.decode(), re.MULTILINE)) == 4
    reader = MarkdownIt("commonmark").enable("table").enable("strikethrough")
    tokens = reader.parse(card.decode().split("---\n", 2)[2])
    inline = [child for token in tokens for child in token.children or [] if token.type == "inline"]
    assert {child.type for child in inline} <= {"text", "text_special", "code_inline"}
    links = r"(?i)https?://|www\.|(?<!\\)<[a-z]"
    assert not re.search(links, card.decode().replace("hf:org/zoo", ""))
    assert sum(token.type == "td_open" for token in tokens) == 2 * 9
