"""Noise: Philox against its published vectors; Gumbel values bit for bit and against float64."""

import ctypes
import shlex
import subprocess
from fractions import Fraction

import pytest
import torch
from helpers.ops.op_cases import generator
from helpers.places import ROOT

from build_support import native
from build_support.toolchain import find_cxx
from specdec_ext.reference import rng

ISAS = ["baseline", "avx2", "avx512"]

# Edges of the input, of the conversion to float32 (2^24), of the branch 1 - v >= sqrt(1/2), and of the clamp
# of v.
EDGE_BITS = [
    *(0, 1, 2, 3, 4, 5, 7, 8, 2**23 - 1, 2**23, 2**24 - 1, 2**24, 2**24 + 1, 2**31 - 1, 2**31),
    *(round((1 - 0.5**0.5) * 2**32) + offset for offset in range(-200, 200, 7)),
    *(2**32 - 2**power - 1 for power in range(12)),
    *(2**32 - 2**power for power in range(12)),
    *(2**power for power in range(32)),
]


def sample_bits() -> torch.Tensor:
    uniform = torch.randint(2**32, (200_000,), generator=generator(0))
    small = 2 ** (torch.rand(50_000, generator=generator(1)) * 32)
    return torch.cat([torch.tensor(EDGE_BITS), uniform, small.long()])


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123
        ("00000000 " * 4, "00000000 " * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
        ("ffffffff " * 4, "ffffffff " * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
        ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
    ],
    ids=["zeros", "ones", "pi"],
)  # fmt: skip
def test_philox_known_answers(counter, key, expected):
    def words(text):
        return tuple(torch.tensor(int(word, 16)) for word in text.split())

    assert rng.philox4x32_10(words(counter), words(key)) == words(expected)


def test_noise_depends_on_seed_row_and_position():
    def bits(seed=1, row=2, position=3):
        return rng.noise_bits(*map(torch.tensor, (seed, row, position)), 10)

    assert len(set(bits().tolist())) == 10
    for changed in (bits(seed=2), bits(seed=1 + 2**32), bits(row=3), bits(position=4)):
        assert not (changed == bits()).any()


def test_noise_of_a_token_does_not_depend_on_the_vocabulary():
    seed, row, position = map(torch.tensor, (-5, 0, 2**31))
    small = rng.noise_bits(seed, row, position, 13)
    assert torch.equal(rng.noise_bits(seed, row, position, 1000)[:13], small)


def test_fma_rounds_once():
    """Compared with rational arithmetic, for sums that cancel and for ties that two roundings would
    change."""
    a, b = torch.randn(2, 3000, generator=generator(2))
    c = torch.cat([-(a * b)[:1000], torch.randn(2000, generator=generator(3)) * 2.0**-24])
    a[-1], b[-1], c[-1] = 1 + 2.0**-12, 1 + 2.0**-12, 2.0**-60  # a tie of a * b, broken by c
    for x, y, z, result in zip(*(t.tolist() for t in (a, b, c, rng.fma32(a, b, c))), strict=True):
        exact = Fraction(x) * Fraction(y) + Fraction(z)
        above = torch.tensor([result]).nextafter(torch.tensor([torch.inf])).item()
        below = torch.tensor([result]).nextafter(torch.tensor([-torch.inf])).item()
        error = abs(Fraction(result) - exact)
        assert error <= abs(Fraction(above) - exact)
        assert error <= abs(Fraction(below) - exact)


@pytest.fixture(scope="module")
def noise_probe(tmp_path_factory) -> ctypes.CDLL:
    """``csrc/testing/noise_probe.cpp``, compiled with the flags of the op library."""
    library = tmp_path_factory.mktemp("noise") / "noise_probe.so"
    flags = shlex.split(f"{native.CXX_FLAGS} {native.include_flags()} -shared")
    sources = [ROOT / "csrc" / name for name in ("testing/noise_probe.cpp", "cpu/runtime/isa.cpp")]
    subprocess.run([*shlex.split(find_cxx()), *flags, *sources, "-o", library], check=True)
    return ctypes.CDLL(str(library))


@pytest.mark.parametrize("isa", ISAS)
def test_compiled_noise_has_the_bits_of_the_reference(isa, noise_probe):
    bits = sample_bits()
    packed = (bits & 0xFFFFFFFF).to(torch.uint32)
    compiled = torch.empty(len(bits))
    buffers = [ctypes.c_void_p(tensor.data_ptr()) for tensor in (packed, compiled)]
    count = ctypes.c_int64(len(bits))
    status = noise_probe.specdec_probe_gumbel(ISAS.index(isa), *buffers, count)
    if status != 0:
        pytest.skip(f"this processor has no {isa}")
    expected = rng.gumbel(bits)
    differs = compiled.view(torch.int32) != expected.view(torch.int32)
    assert not differs.any(), bits[differs][:5]


def test_error_against_float64_is_within_the_bounds_of_rng_h():
    """Of the arithmetic, and of the rounding of v to float32."""
    bits = torch.cat([sample_bits(), 2**32 - 1 - sample_bits()])
    noise, exact = rng.gumbel(bits).double(), rng.gumbel_float64(bits)
    at_same_v = -torch.log(-torch.log1p(-rng.uniform(bits).double()))
    arithmetic_error = (noise - at_same_v).abs()
    assert arithmetic_error.max() < 1.1e-6
    assert arithmetic_error[exact < 8].max() < 3.5e-7
    error = (noise - exact).abs()
    assert error[exact > -1.5].max() < 1.1e-6
    assert error.max() < 0.025


def test_noise_has_its_largest_value_at_zero_bits():
    edges = rng.gumbel(torch.tensor([0, 1, 2**32 - 1]))
    assert edges[0].item() == pytest.approx(33 * 0.6931471805599453, abs=1e-6)
    assert edges[1] < edges[0] < 22.875  # the bound that lets the CPU op skip noise
    assert edges[2].item() == pytest.approx(-2.81154, abs=1e-5)
    assert rng.gumbel(sample_bits()).max() <= edges[0]


def test_noise_is_monotonic_up_to_rounding():
    bits = sample_bits().sort().values
    noise = rng.gumbel(bits)
    assert (noise.diff() <= 2**-20).all()


def test_noise_has_mean_and_variance_of_gumbel():
    """Within five standard errors of 0.5772 and pi^2 / 6 over 200000 values."""
    seed, row, position = map(torch.tensor, (17, 0, 5))
    noise = rng.gumbel_noise(seed, row, position, 200_000).double()
    assert noise.mean().item() == pytest.approx(0.5772156649, abs=5 * (1.645 / 200_000) ** 0.5)
    assert noise.var().item() == pytest.approx(1.6449340668, abs=5 * (4.4 * 2.7 / 200_000) ** 0.5)
