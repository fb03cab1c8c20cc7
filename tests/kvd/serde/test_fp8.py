"""FP8: the rules of E4M3 to the bit, the error bounds that are stated, and what is left alone."""

import numpy as np
import pytest
from numpy.typing import NDArray

from kvd.tiers.serde import fp8
from kvd.tiers.serde.fp8 import BLOCK, FLOATS, Fp8
from kvd.tiers.serde.stage import Damaged

DTYPES = sorted(FLOATS)
Doubles = NDArray[np.float64]


def e4m3() -> Doubles:
    """The number that each of the 256 codes stands for, straight from the specification (NaN: 0x7f, 0xff)."""
    code = np.arange(256)
    field, mantissa = code >> 3 & 15, code & 7
    size = np.where(field == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * 2.0 ** (field - 7))
    size[(code & 0x7F) == 0x7F] = np.nan
    return np.where(code & 0x80, -size, size)


def nearest(values: Doubles) -> NDArray[np.uint8]:
    """The code of the number nearest to each value, ties to the even code, by trying: slow and plain."""
    table = e4m3()[:0x7F]
    size = np.abs(values)
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    code = np.where(size >= table[-1], len(table) - 1, np.where(up, above, above - 1))
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def floats(dtype: str, values: Doubles) -> bytes:
    """The bytes of these numbers in that type; for bfloat16 what does not fit is cut off."""
    if dtype == "bfloat16":
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16).tobytes()
    return values.astype(dtype).tobytes()


def numbers(dtype: str, raw: bytes | bytearray) -> Doubles:
    """The way back."""
    if dtype == "bfloat16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return np.frombuffer(raw, dtype).astype(np.float64)


def there_and_back(stage: Fp8, raw: bytes) -> tuple[bytes, bytes] | None:
    """What it is encoded to, and what comes back."""
    target = memoryview(bytearray(stage.bound(len(raw))))
    length = stage.encode(memoryview(raw), target, b"", b"")
    if length is None:
        return None
    assert length == len(target)
    into = bytearray(len(raw))
    stage.decode(target.toreadonly(), memoryview(into), b"", b"")
    return bytes(target), bytes(into)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_code_comes_back_as_itself(dtype: str) -> None:
    table = e4m3()
    held = np.where(np.isnan(table), 0.0, table)
    stage = Fp8(dtype)
    for scale in (0, 1, 3, -3) if dtype != "float16" else (0, 1, 3):
        # 448 in each block: then the scale of the block is the one that makes the codes themselves.
        values = np.concatenate([np.r_[part, 448.0] for part in np.split(held, 4)])
        values = np.concatenate([np.resize(part, BLOCK) for part in np.split(values, 4)]) * 2.0**scale
        raw = floats(dtype, values)
        made = there_and_back(stage, raw)
        assert made is not None
        assert made[1] == raw


@pytest.mark.parametrize("dtype", DTYPES)
def test_codes_are_the_nearest_of_the_specification(dtype: str) -> None:
    rng = np.random.default_rng(7)
    count = 64 * BLOCK
    spread = rng.standard_normal(count) * 2.0 ** rng.integers(-9, 3, count)
    values = numbers(dtype, floats(dtype, spread))
    stage = Fp8(dtype)
    made = there_and_back(stage, floats(dtype, values))
    assert made is not None
    codes, shifts = np.frombuffer(made[0], np.uint8)[:count], np.frombuffer(made[0], np.uint8)[count:]
    # The unit of a block: E4M3's bias is 7, so the exponent fields differ by (bias - 7), and the block was moved by its shift.
    unit = 2.0 ** (shifts.astype(float) - FLOATS[dtype].bias + 7)
    scaled = values / np.repeat(unit, BLOCK)
    assert np.array_equal(codes, nearest(scaled))
    assert np.array_equal(numbers(dtype, made[1]), e4m3()[codes] * np.repeat(unit, BLOCK))


def test_ties_go_to_the_even_code_and_carries_run_on() -> None:
    values = np.full(BLOCK, 3.0)
    values[0] = 448.0
    # Halves between neighbours: 1.0625 lies between 1 (even) and 1.125; 1.1875 between 1.125 and 1.25 (even); 1.9375 carries.
    values[1:8] = [1.0625, 1.1875, 1.9375, -1.9375, 2**-10, 3 * 2**-10, 5 * 2**-10]
    made = there_and_back(Fp8("float32"), values.astype(np.float32).tobytes())
    assert made is not None
    back = numbers("float32", made[1])
    assert back[1:8].tolist() == [1.0, 1.25, 2.0, -2.0, 0.0, 4 * 2**-10, 4 * 2**-10]


def test_the_largest_of_a_block_never_becomes_nan() -> None:
    # Around 1.8125, where rounding would go from 448 to what is NaN in E4M3, in every exponent.
    for exponent in range(-100, 100, 7):
        for mantissa in (1.75, 1.8046875, 1.8125, 1.8203125, 1.9921875):
            values = np.full(BLOCK, mantissa * 2.0**exponent)
            made = there_and_back(Fp8("bfloat16"), floats("bfloat16", values))
            assert made is not None
            assert not (np.frombuffer(made[0], np.uint8)[:BLOCK] & 0x7F == 0x7F).any()
            assert np.abs(numbers("bfloat16", made[1]) / values - 1).max() <= 1 / 16


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", ["normal", "outliers", "zeros", "tiny"])
def test_the_error_stays_below_the_stated_bounds(dtype: str, shape: str) -> None:
    rng = np.random.default_rng(3)
    values = rng.standard_normal(4096 * 3 + 57)  # the last block is short
    if shape == "outliers":
        values[rng.integers(0, len(values), 200)] *= 1000
    elif shape == "zeros":
        values[rng.random(len(values)) < 0.9] = 0.0
        values[:BLOCK] = -0.0
    elif shape == "tiny":
        values *= 2.0**-20 if dtype == "float16" else 2.0**-130
    raw = floats(dtype, values)
    made = there_and_back(Fp8(dtype), raw)
    assert made is not None
    before, after = numbers(dtype, raw), numbers(dtype, made[1])
    padded = np.concatenate([np.abs(before), np.zeros(-len(before) % BLOCK)])
    largest = np.repeat(padded.reshape(-1, BLOCK).max(axis=1), BLOCK)[: len(before)]
    error = np.abs(after - before)
    normal = np.abs(before) >= largest / 2**14
    # What is subnormal already in a float of this type has fewer bits than a relative bound speaks of.
    least = 2.0 ** (1 - FLOATS[dtype].bias - 4)
    assert (error[normal] <= np.maximum(np.abs(before[normal]) / 16, least)).all()
    assert (error[~normal] <= np.maximum(largest[~normal] / 2**17, least)).all()
    assert not after[before == 0].any()
    assert np.array_equal(np.signbit(after), np.signbit(before))


def test_what_holds_infinities_or_nan_or_is_no_floats_is_left_alone() -> None:
    rng = np.random.default_rng(5)
    stage = Fp8("bfloat16")
    good = floats("bfloat16", rng.standard_normal(10_000))
    assert there_and_back(stage, good) is not None
    for strange in (np.inf, -np.inf, np.nan):
        values = rng.standard_normal(10_000)
        values[9_999] = strange
        assert there_and_back(stage, floats("bfloat16", values)) is None
    assert there_and_back(stage, rng.integers(0, 256, 20_000, dtype=np.uint8).tobytes()) is None
    # FP8 bytes taken for bfloat16: keys and values of a cache that is quantized already.
    packed = there_and_back(stage, good * 2)
    assert packed is not None
    assert there_and_back(stage, packed[0][:20_000]) is None
    assert there_and_back(stage, good[:-1]) is None
    assert there_and_back(stage, b"") is None


def test_damaged_codes_are_noticed_where_that_is_possible() -> None:
    stage = Fp8("float16")
    raw = floats("float16", np.random.default_rng(1).standard_normal(1000))
    target = bytearray(stage.bound(len(raw)))
    assert stage.encode(memoryview(raw), memoryview(target), b"", b"") == len(target)
    into = memoryview(bytearray(len(raw)))
    target[-1] = 200
    with pytest.raises(Damaged, match="scale"):
        stage.decode(memoryview(target), into, b"", b"")
    with pytest.raises(Damaged, match="cannot be"):
        stage.decode(memoryview(target)[:-1], into, b"", b"")


def test_long_values_are_worked_off_in_steps_without_seams(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = floats("bfloat16", np.random.default_rng(2).standard_normal(5000))
    whole = there_and_back(Fp8(), raw)
    monkeypatch.setattr(fp8, "STEP", 4 * BLOCK)
    assert there_and_back(Fp8(), raw) == whole
