import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.access.entries import (
    PRIORITY_CLASSES,
    KeyEntry,
    digest_of,
    format_entry,
    new_key,
    parse_entries,
    parse_entry,
    read_key_file,
)

HASH = "sha256:" + hashlib.sha256(b"key-1").hexdigest()

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", fullmatch=True)
limits = st.none() | st.integers(0, 10**12).map(float)


@given(
    st.builds(
        KeyEntry,
        st.binary(min_size=32, max_size=32),
        st.none() | names,
        limits,
        limits,
        st.sampled_from(PRIORITY_CLASSES),
        st.booleans(),
    )
)
def test_entries_come_back_as_they_were_written(entry):
    line = format_entry(entry)
    assert parse_entry(line) == entry
    assert parse_entry(line.replace(" ", ",")) == entry


@given(st.text())
def test_any_line_is_an_entry_or_a_sentence(text):
    try:
        entry = parse_entry(text)
    except ValueError as error:
        entry, complaint = None, str(error)
    assert complaint if entry is None else len(entry.digest) == 32


def test_a_hash_and_its_key_are_the_same_entry():
    assert parse_entry("key-1 tenant=a admin") == parse_entry(f"{HASH} admin=true tenant=a")
    assert parse_entry("key-1") == KeyEntry(digest_of("key-1"))
    # A key may hold commas; only behind a hash they part fields.
    assert parse_entry("a,admin") == KeyEntry(digest_of("a,admin"))


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("sha256:12", "64 hexadecimal digits"),
        ("k secret-of-somebody", "after the key only"),
        ("k tenant=", "tenant must be"),
        ("k tenant=a/b", "tenant must be"),
        ("k tenant=a tenant=b", "twice"),
        ("k requests_per_minute=-1", "zero"),
        ("k requests_per_minute=many", "a number"),
        ("k tokens_per_minute=nan", "a number"),
        ("k tokens_per_minute=inf", "a number"),
        ("k priority=urgent", "one of high, normal, low"),
        ("k admin=maybe", "stands alone"),
    ],
)
def test_bad_lines_are_told_by_number_and_never_repeated(line, complaint):
    with pytest.raises(ValueError, match=complaint) as raised:
        parse_entries(["# a comment", "", line], "keys")
    assert str(raised.value).startswith("keys, line 3: ")
    assert "secret-of-somebody" not in str(raised.value)


def test_one_key_stands_once():
    with pytest.raises(ValueError, match="line 2: this key stands in line 1 already"):
        parse_entries(["key-1", HASH], "keys")


def test_key_files(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# ours\n{HASH} tenant=a\n\n  key-2  \n")
    assert read_key_file(path) == (KeyEntry(digest_of("key-1"), "a"), KeyEntry(digest_of("key-2")))
    path.write_text("# none\n")
    with pytest.raises(ValueError, match="holds no key"):
        read_key_file(path)
    path.write_bytes(b"secret-\xff")
    with pytest.raises(ValueError, match="it is not UTF-8") as raised:
        read_key_file(path)
    assert "secret" not in str(raised.value)
    with pytest.raises(ValueError, match="cannot be read"):
        read_key_file(tmp_path / "absent")


def test_keys_cannot_be_guessed():
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("tk-") and len(key) >= 46 for key in keys)
