"""Tokenizers small enough to predict by eye: one token per character."""

from collections.abc import Mapping, Sequence
from pathlib import Path


class Letters:
    """One token per character, its code point; end of text is 0."""

    def __init__(self, prefix: tuple[int, ...] = (), eos: int | None = 0) -> None:
        self.prefix = list(prefix)
        self.eos_token_id = eos

    def __call__(
        self, text: str, *, add_special_tokens: bool, verbose: bool
    ) -> Mapping[str, list[int]]:
        return {"input_ids": (self.prefix if add_special_tokens else []) + [ord(c) for c in text]}


class ChatLetters(Letters):
    """Writes `<u>...` and `<a>...`, refuses the role `system`; `<a>` alone asks for an answer."""

    chat_template = "set"

    def __init__(
        self, prefix: tuple[int, ...] = (), eos: int | None = 0, *, start: str = "", end: str = ""
    ) -> None:
        super().__init__(prefix, eos)
        self.start, self.end = start, end

    def apply_chat_template(
        self, turns: Sequence[Mapping[str, str]], *, tokenize: bool, add_generation_prompt: bool
    ) -> str:
        assert not tokenize
        if any(turn["role"] == "system" for turn in turns):
            raise RuntimeError("no system turns here\nsecond line")
        text = "".join(f"<{turn['role'][0]}>{turn['content']}" for turn in turns)
        return self.start + text + ("<a>" if add_generation_prompt else self.end)


def write(folder: Path, content: str | bytes, name: str = "data.txt") -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def spell(sequence: Sequence[int]) -> str:
    """The text of token ids, end of text as a bar."""
    return "".join("|" if token == 0 else chr(token) for token in sequence)
