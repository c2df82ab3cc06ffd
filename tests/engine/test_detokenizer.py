"""Streamed text is the final text, and a stop text is found wherever the tokens' borders lie."""

import json
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers import models as tokenizer_models
from transformers import CTRLTokenizer, PreTrainedTokenizerFast

from cbresearch import models
from cbresearch.engine.detokenizer import Detokenizer
from cbresearch.models import TextDecoder

UNFINISHED = "\ufffd"


def decode_bytes(token_ids):
    """Decode as a tokenizer of bytes does: a token a byte."""
    return bytes(token_ids).decode(errors="replace")


def decode_pieces(pieces):
    """Return a decoder of tokens that stand for some bytes each."""
    return lambda token_ids: b"".join(pieces[token] for token in token_ids).decode(errors="replace")


def detokenize(decode, token_ids, stop=(), min_tokens=0):
    """Return the detokenizer at the end, what it gave out, and the tokens that it took."""
    text = Detokenizer(decode, stop, min_tokens)
    given, taken = [], 0
    for place, token in enumerate(token_ids, start=1):
        given.append(text.push(token))
        taken = place
        if text.stopped_by is not None:
            break
    given.append(text.finish())
    return text, given, taken


def naive(decode, token_ids, stop, min_tokens=0):
    """Decode the whole output after each token and look for a stop text that was not there before.

    Returns the text, how many tokens it took, and what stopped it.
    """
    before = 0
    for taken in range(1, len(token_ids) + 1):
        text = decode(token_ids[:taken]).rstrip(UNFINISHED)
        found = [
            (place, end)
            for end in stop
            for place in range(len(text) - len(end) + 1)
            if text.startswith(end, place) and place + len(end) > before
        ]
        before = len(text)
        if found and taken >= min_tokens:
            place, end = min(found)
            return text[:place], taken, end
    return decode(token_ids), len(token_ids), None


@pytest.mark.parametrize("text", ["plain", "Grüße", "世界 🙂 é", "🙂🙂", "a🙂b", "é", ""])
def test_characters_come_whole_when_their_last_byte_is_there(text):
    _, given, _ = detokenize(decode_bytes, text.encode())
    assert "".join(given) == text
    assert not any(UNFINISHED in part for part in given)
    assert [part for part in given if part] == list(text)


def test_bytes_that_are_no_character_are_shown_when_that_is_certain():
    broken = b"a\xe2\x82b\xff\xffc\xe2"
    _, given, _ = detokenize(decode_bytes, broken)
    assert "".join(given) == broken.decode(errors="replace")
    assert given == ["a", "", "", f"{UNFINISHED}b", "", "", f"{UNFINISHED * 2}c", "", UNFINISHED]


def test_a_stop_text_is_found_across_tokens_and_cut_off():
    pieces = [b"The en", b"d of", b" it", b" all"]
    text, given, taken = detokenize(decode_pieces(pieces), range(4), ["end of it"])
    assert (text.text, taken, text.stopped_by) == ("The ", 3, "end of it")
    assert given == ["The ", "", "", ""]


def test_a_stop_text_in_the_middle_of_a_token_cuts_what_follows_in_it():
    pieces = [b"one\ntwo\nthree"]
    text, given, taken = detokenize(decode_pieces(pieces), [0], ["\n"])
    assert (text.text, given, taken) == ("one", ["one", ""], 1)


@pytest.mark.parametrize("stop", [["three", "two", "one"], ["one", "two", "three"]])
def test_the_stop_text_that_begins_first_wins_whatever_its_place_in_the_list(stop):
    text, _, _ = detokenize(decode_pieces([b"0 one two three"]), [0], stop)
    assert (text.text, text.stopped_by) == ("0 ", "one")


def test_what_only_began_like_a_stop_text_is_given_out_later():
    text, given, _ = detokenize(decode_bytes, b"aab aabc", ["aabc"])
    assert text.text == "aab "
    assert given == ["", "", "", "aab ", "", "", "", "", ""]
    text, given, _ = detokenize(decode_bytes, b"aaaab", ["aab"])
    assert (text.text, "".join(given)) == ("aa", "aa")


def test_an_output_that_ends_where_a_stop_text_had_begun_keeps_its_text():
    text, given, taken = detokenize(decode_bytes, b"xyEN", ["END"])
    assert (text.text, taken, text.stopped_by) == ("xyEN", 4, None)
    assert given == ["x", "y", "", "", "EN"]


@pytest.mark.parametrize("min_tokens", range(9))
def test_a_stop_text_that_is_complete_too_early_does_not_count(min_tokens):
    text, given, taken = detokenize(decode_bytes, b"a.b.c.", ["."], min_tokens)
    expected = {0: 2, 1: 2, 2: 2, 3: 4, 4: 4, 5: 6, 6: 6}.get(min_tokens)
    assert taken == (expected or 6)
    assert text.text == "".join(given) == ("a.b.c"[: expected - 1] if expected else "a.b.c.")


def test_a_stop_text_counts_although_its_token_ends_within_a_character():
    # As byte-level tokenizers have them: the end of a line, and a third of the next character.
    pieces = [b"a", b"\n\xe2", b"\x82\xac", b"b"]
    text, given, taken = detokenize(decode_pieces(pieces), range(4), ["\n"])
    assert (text.text, taken) == ("a", 2)
    assert given == ["a", "", ""]


def test_a_stop_text_may_begin_with_a_character_that_spans_tokens():
    text, given, taken = detokenize(decode_bytes, "no 🙂! yes".encode(), ["🙂!"])
    assert (text.text, taken, "".join(given)) == ("no ", 8, "no ")


def test_tokens_without_text_change_nothing_about_what_follows():
    # A decoder that strips the space that a text begins with, and special tokens that have no text.
    words = ["▁one", "▁two", "", "▁three"]

    def decode(token_ids):
        return "".join(words[token] for token in token_ids).replace("▁", " ").removeprefix(" ")

    for token_ids in ([0, 2, 2, 1, 2, 3], [2, 0, 2, 3], [2, 2, 2, 1, 0]):
        text, given, _ = detokenize(decode, token_ids)
        assert text.text == "".join(given) == decode(token_ids)


def test_nothing_is_taken_in_behind_a_stop_text():
    text = Detokenizer(decode_bytes, ["b"])
    assert [text.push(token) for token in b"abcb"] == ["a", "", "", ""]
    assert (text.finish(), text.text, text.stopped_by) == ("", "a", "b")


def test_only_the_last_few_tokens_are_decoded_again():
    lengths = []

    def decode(token_ids):
        lengths.append(len(token_ids))
        return decode_bytes(token_ids)

    detokenize(decode, b"abc" * 200)
    # But for all of them at the end.
    assert max(lengths[:-1]) == 2


BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
LOWER_BYTES = [*(piece.lower() for piece in BYTES), "<0x+A>"]
JOINED = ["b@@ ", "b", "@@", " ", "@@ ", "n", " '", "t", " n", ".", " b", "'"]
WORDS = [
    "it",
    "n",
    "t",
    "do",
    "##ing",
    "##s",
    "'",
    "s",
    ".",
    ",",
    "?",
    "!",
    "m",
    "ve",
    "v",
    "re",
    "r",
    "[UNK]",
]
PIECES = [
    "<unk>",
    "▁",
    "▁▁",
    "▁a",
    "a",
    "b",
    "'",
    "▁'",
    "s",
    "▁s",
    "n",
    "▁n",
    "t",
    ".",
    "▁.",
    "é",
    "v",
    "▁v",
    "e",
]
STRIPPED = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
SPELT = [*sorted(pre_tokenizers.ByteLevel.alphabet()), "Ġ'", "'s", "ðŁ", "ðŁĻĤ", "¬âĤ"]
SUFFIXED = ["<unk>", "a</w>", "b", "hello</w>", "'</w>", "s</w>"]


def numbered(pieces):
    return {piece: number for number, piece in enumerate(pieces)}


def bpe(pieces):
    return tokenizer_models.BPE(numbered(pieces), [])


TOKENIZERS = {
    "bytes": (bpe(SPELT), decoders.ByteLevel()),
    "word pieces": (tokenizer_models.WordPiece(numbered(WORDS), unk_token="[UNK]"), decoders.WordPiece()),
    "words": (
        tokenizer_models.WordPiece(numbered(WORDS), unk_token="[UNK]"),
        decoders.WordPiece(cleanup=False),
    ),
    "unigrams": (tokenizer_models.Unigram([(piece, 0.0) for piece in PIECES], 0), decoders.Metaspace()),
    "byte fallback": (bpe([*PIECES, *BYTES]), decoders.Sequence(STRIPPED)),
    "byte fallback, unstripped": (bpe([*PIECES, *BYTES]), decoders.Sequence(STRIPPED[:-1])),
    "byte fallback, lower case": (bpe([*PIECES, *LOWER_BYTES]), decoders.Sequence(STRIPPED)),
    "suffixes": (bpe(SUFFIXED), decoders.BPEDecoder()),
    "joined": (bpe(JOINED), decoders.Sequence([decoders.Fuse(), decoders.Replace("@@ ", "")])),
    "repeated": (bpe(["<pad>", "|", "a", "b", "'"]), decoders.CTC()),
    "joined, byte fallback": (
        bpe([*JOINED, *BYTES]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("@@ ", "")]),
    ),
}


def build_tokenizer(kind, cleans_up=False):
    model, decoder = TOKENIZERS[kind]
    built = Tokenizer(model)
    built.decoder = decoder
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=built, clean_up_tokenization_spaces=cleans_up, eos_token="<eos>", pad_token="<pad>"
    )
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    return tokenizer


@pytest.mark.parametrize("cleans_up", [False, True])
@pytest.mark.parametrize("kind", TOKENIZERS)
def test_a_stream_is_what_the_tokenizer_makes_of_all_tokens(kind, cleans_up):
    tokenizer = build_tokenizer(kind, cleans_up)
    decode, rng = TextDecoder(tokenizer), np.random.default_rng(0)
    # Where there are bytes, most of them begin or go on with characters.
    byte_ids = tokenizer.convert_tokens_to_ids(["<0xE2>", "<0x82>", "<0xAC>", "<0x41>", "<0xFF>"])
    byte_ids += tokenizer.convert_tokens_to_ids(["<0xe2>", "<0xac>", "<0x41>", "<0x+a>"])
    likely = [token for token in byte_ids if token is not None] + list(
        range(min(len(PIECES), len(tokenizer)))
    )
    for length in [*rng.integers(0, 25, size=150).tolist(), 300, 300]:
        pool = rng.choice(likely if rng.random() < 0.5 else len(tokenizer), int(rng.integers(2, 9)))
        token_ids = rng.choice(pool if length < 300 else len(tokenizer), length).tolist()
        text, given, _ = detokenize(decode, token_ids)
        want = tokenizer.decode(token_ids, skip_special_tokens=True)
        assert "".join(given) == text.text == want, tokenizer.convert_ids_to_tokens(token_ids)


@pytest.mark.parametrize("cleans_up", [False, True])
def test_a_stream_is_what_a_tokenizer_in_python_makes_of_all_tokens(cleans_up, tmp_path):
    pieces = ["<unk>", "b@@", "b", "c@@", "'", "t", "n", "@@", "."]
    (tmp_path / "vocab.json").write_text(json.dumps(numbered(pieces)))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n")
    tokenizer = CTRLTokenizer(
        tmp_path / "vocab.json", tmp_path / "merges.txt", clean_up_tokenization_spaces=cleans_up
    )
    rng = np.random.default_rng(0)
    cases = [[1, 1], [2, 2, 2], *(rng.integers(len(pieces), size=size).tolist() for size in [*range(40)] * 4)]
    for token_ids in cases:
        text, given, _ = detokenize(TextDecoder(tokenizer), token_ids)
        assert "".join(given) == text.text == tokenizer.decode(token_ids, skip_special_tokens=True)
    _, given, _ = detokenize(TextDecoder(tokenizer), [1, 2, 2, 3, 2])
    assert given == ["", "", "bb", " b", "", " cb"]
    text, _, taken = detokenize(TextDecoder(tokenizer), [2, 3, 2, 2], ["cb"])
    assert (text.text, taken, text.stopped_by) == ("b ", 3, "cb")


def test_text_that_a_tokenizer_cleans_up_comes_when_it_is_sure():
    tokenizer = build_tokenizer("word pieces", cleans_up=True)
    _, given, _ = detokenize(TextDecoder(tokenizer), tokenizer.convert_tokens_to_ids(["it", "'", "s", "do"]))
    assert given == ["it", "", "'s", " do", ""]
    token_ids = tokenizer.convert_tokens_to_ids(["it", "'", "s", "do", "n", "'", "t"])
    for stop, taken in (("it's", 3), ("t's d", 4), ("don't", 7)):
        text, given, number = detokenize(TextDecoder(tokenizer), token_ids, [stop])
        assert (text.stopped_by, number) == (stop, taken)
        assert "".join(given) == text.text == "it's don't"[: "it's don't".index(stop)]


def test_a_run_of_bytes_comes_with_what_ends_it_and_can_stop_an_output_at_once():
    tokenizer = build_tokenizer("byte fallback")
    find = tokenizer.convert_tokens_to_ids
    token_ids = find(["▁a", "<0xE2>", "<0x82>", "<0xAC>", "<eos>", "<0x0A>", "b", "<0x0A>", "<0xFF>"])
    _, given, _ = detokenize(TextDecoder(tokenizer), token_ids)
    assert given == ["a", "", "", "", "", "", "€\nb", "", "", UNFINISHED * 2]
    text, given, taken = detokenize(TextDecoder(tokenizer), token_ids, ["\n"])
    assert ("".join(given), taken, text.stopped_by) == ("a€", 6, "\n")


@pytest.mark.parametrize(
    ("kind", "piece", "cleans_up"),
    [
        ("bytes", "ÿ", False),
        ("bytes", "ðŁ", False),
        ("bytes", "¬âĤ", False),
        ("bytes", "Ġ", True),
        ("word pieces", "n", True),
        ("word pieces", "'", True),
        ("byte fallback", "<0xFF>", False),
        ("byte fallback", "<0x41>", False),
        ("unigrams", "▁", True),
        ("bytes", "<eos>", False),
        ("bytes", None, False),
    ],
)
def test_any_output_is_decoded_in_a_time_in_proportion_to_its_tokens(kind, piece, cleans_up):
    tokenizer, lengths = build_tokenizer(kind, cleans_up), []

    class Counting(TextDecoder):
        def __call__(self, token_ids):
            lengths.append(len(token_ids))
            return super().__call__(token_ids)

    # A model may have more tokens than its tokenizer.
    token_ids = (tokenizer.convert_tokens_to_ids([piece]) if piece else [len(tokenizer) + 5]) * 1000
    text, given, _ = detokenize(Counting(tokenizer), token_ids, ["never there"])
    assert "".join(given) == text.text == tokenizer.decode(token_ids, skip_special_tokens=True)
    assert sum(lengths) < 50 * len(token_ids)


def test_a_prompt_is_whole_while_another_thread_truncates_with_the_tokenizer(tiny):
    tokenizer = build_tokenizer("word pieces")
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.backend_tokenizer.enable_truncation(3)
    loaded = models.wrap("m", tiny.model, tokenizer)
    assert tokenizer.backend_tokenizer.truncation["max_length"] == 3
    done = threading.Event()

    def truncate():
        while not done.is_set():
            tokenizer(["it do"] * 20, padding=True, truncation=True, max_length=2)
            tokenizer("it do")

    thread = threading.Thread(target=truncate)
    thread.start()
    try:
        assert {len(loaded.encode("it n t do " * 20)) for _ in range(200)} == {80}
    finally:
        done.set()
        thread.join()


# Bytes that begin, go on with and end characters of each length, and stop texts that overlap themselves.
TOKENS = st.lists(
    st.sampled_from(["a", "b", "ab", "ba", "€", "🙂", "é", "\n"]).map(str.encode)
    | st.sampled_from(
        [b"\xe2", b"\x82", b"\xac", b"\xf0\x9f", b"\x99\x82", b"a\xe2", b"\xacb", b"\xff", b""]
    ),
    max_size=14,
)
STOPS = st.lists(st.text("ab€🙂\n", min_size=1, max_size=4), max_size=3)


@settings(max_examples=600, deadline=None, derandomize=True)
@given(TOKENS, STOPS, st.integers(0, 6))
def test_a_stream_equals_decoding_everything_again_after_each_token(pieces, stop, min_tokens):
    decode, token_ids = decode_pieces(pieces), range(len(pieces))
    text, given, taken = detokenize(decode, token_ids, stop, min_tokens)
    assert (text.text, taken, text.stopped_by) == naive(decode, token_ids, stop, min_tokens)
    assert "".join(given) == text.text


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.text(max_size=20), st.data())
def test_any_text_cut_anywhere_into_tokens_comes_back(text, data):
    whole = text.encode(errors="replace")
    cuts = sorted(data.draw(st.sets(st.integers(0, len(whole)))))
    pieces = [
        whole[start:end] for start, end in zip([0, *cuts], [*cuts, len(whole)], strict=True) if end > start
    ]
    result, given, _ = detokenize(decode_pieces(pieces), range(len(pieces)))
    assert result.text == "".join(given) == whole.decode()


@pytest.mark.weights
def test_the_stream_of_a_real_tokenizer_is_its_decoded_text():
    try:
        loaded = models.load("smollm2-135m")
    except ValueError as error:
        pytest.skip(str(error))
    texts = [
        "Hello, world! It's 3 o'clock ; isn't it ?",
        "Grüße aus 東京 🙂👩‍👩‍👧 \n\n\t- a list\n",
        "def f(x):\n    return x ** 2  # naïve",
    ]
    rng = np.random.default_rng(0)
    outputs = [list(loaded.encode(text)) for text in texts]
    outputs += [rng.integers(loaded.shape.vocab_size, size=60).tolist() for _ in range(20)]
    for token_ids in outputs:
        whole = loaded.decode(token_ids)
        text, given, _ = detokenize(loaded.decode, token_ids)
        assert text.text == "".join(given) == whole
        stop = whole[len(whole) // 2 : len(whole) // 2 + 3]
        if UNFINISHED in stop:
            continue
        text, given, taken = detokenize(loaded.decode, token_ids, [stop])
        assert text.text == "".join(given) == whole[: whole.index(stop)]
        assert stop in loaded.decode(token_ids[:taken])
        assert stop not in loaded.decode(token_ids[: taken - 1]).rstrip(UNFINISHED)
