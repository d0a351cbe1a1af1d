"""Small tokenizers of the kinds that models use, trained on real questions in ten languages."""

import functools
import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

DATA = Path(__file__).parent.parent / "data"
SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
TRICKY = (
    "👨‍👩‍👧‍👦 family",  # joined by U+200D
    "🏳️‍🌈🇩🇪👍🏽",  # variation selector, regional indicators, skin tone
    "e\u0301 n\u0303 o\u0302\u0323",  # combining marks
    "क्षि नि ണ്ടോ",
    "שָׁלוֹם عَرَبِيّ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 𒀀 \U0010ffff",
    "  two  spaces\n\n\ttabs  ",
    "a\ufffdb\ufffd",  # a real replacement character
    "nul\x00 and bom\ufeff",
)


@functools.cache
def questions() -> tuple[str, ...]:
    """Real text in ten languages."""
    lines = (DATA / "mgsm_questions.jsonl").read_text("utf-8").splitlines()
    return tuple(json.loads(line)["question"] for line in lines)


@functools.cache
def byte_level() -> Tokenizer:
    """GPT-2's kind: every byte has a token, and merges cross characters."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(questions(), trainer)
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False)])
    return tokenizer


@functools.cache
def byte_fallback() -> Tokenizer:
    """Llama 2's kind: pieces with ▁ for a space, a beginning token, and characters it does not know as byte tokens."""
    pieces = ["▁", *"abcdefghijklmnopqrstuvwxyz.,é的▁", "th", "the", "▁the", "▁a", "▁▁"]
    vocab = {piece: index for index, piece in enumerate(dict.fromkeys([*SPECIAL, *BYTES, *pieces]))}
    merges = [("t", "h"), ("th", "e"), ("▁", "the"), ("▁", "a"), ("▁", "▁")]
    tokenizer = Tokenizer(models.BPE(vocab, merges, byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", vocab["<s>"])])
    return tokenizer


@functools.cache
def metaspace() -> Tokenizer:
    """Gemma's and T5's kind: unigram pieces, with byte tokens for the rest."""
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=500, special_tokens=[*SPECIAL, *BYTES], unk_token="<unk>", show_progress=False, max_piece_length=6
    )
    tokenizer.train_from_iterator([text.lower() for text in questions() if text.isascii()], trainer)
    state = json.loads(tokenizer.to_str())
    state["model"]["byte_fallback"] = True
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in SPECIAL]
    tokenizer = Tokenizer.from_str(json.dumps(state))
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


@functools.cache
def word_piece() -> Tokenizer:
    """BERT's kind: words joined by spaces, ## for the inside of a word."""
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(
        questions(), trainers.WordPieceTrainer(vocab_size=500, special_tokens=SPECIAL, show_progress=False)
    )
    return tokenizer


KINDS = {"byte_level": byte_level, "byte_fallback": byte_fallback, "metaspace": metaspace, "word_piece": word_piece}


def save(tokenizer: Tokenizer, directory: Path, template: str | None = None, config: dict[str, object] | None = None) -> Path:
    """The files that a model directory holds for the queue side."""
    tokenizer.save(str(directory / "tokenizer.json"))
    config = config or {"bos_token": "<s>", "eos_token": {"content": "</s>"}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (directory / "chat_template.jinja").write_text(template, "utf-8")
    return directory
