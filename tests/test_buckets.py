"""Flat buckets: where each gradient lies, and that packing and unpacking change no bit."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, strategies as st

from samestep.summation.buckets import lay_out_buckets, lay_out_shards, pack, unpack
from samestep.summation.layout import Layout

SHAPES = [(), (1,), (0,), (3,), (17,), (40, 5), (2, 3, 2, 2), (1000,)]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
SMALL_BYTES = 2**19


def layout_of(shape, dtype, memory_format=torch.contiguous_format):
    return Layout.of(torch.empty(shape, dtype=dtype).to(memory_format=memory_format), dtype)


shapes = st.sampled_from(SHAPES)
layouts = st.one_of(st.none(), st.builds(layout_of, shapes, st.sampled_from(DTYPES)))
problems = st.tuples(st.lists(layouts, max_size=8), st.sampled_from([1, 100, 1000, 10**7]), st.integers(1, 5))


def num_bytes(layout):
    return layout.num_elements * layout.dtype.itemsize


# ---- which parameters travel together ----------------------------------------------------------------


def slow_groups(layouts, bucket_bytes):
    """From the last parameter to the first, fill one bucket of each dtype after the other."""
    groups = []
    for index in reversed([i for i, layout in enumerate(layouts) if layout is not None]):
        of_dtype = [group for group in groups if layouts[group[0]].dtype == layouts[index].dtype]
        newest = of_dtype[-1] if of_dtype else []
        if newest and sum(num_bytes(layouts[i]) for i in [*newest, index]) <= bucket_bytes:
            newest.append(index)
        else:
            groups.append([index])
    return groups or [[]]


@given(problems)
def test_parameters_are_grouped_by_dtype_from_the_last_to_the_first(problem):
    layouts, bucket_bytes, num_workers = problem
    buckets = lay_out_buckets(layouts, bucket_bytes, num_workers)
    assert [list(bucket.parameters) for bucket in buckets] == slow_groups(layouts, bucket_bytes)
    for bucket in buckets:
        (section,) = bucket.sections
        assert [piece.parameter for piece in section.pieces] == list(bucket.parameters)
        assert [piece.layout for piece in section.pieces] == [layouts[i] for i in bucket.parameters]
        assert {piece.layout.dtype for piece in section.pieces} <= {bucket.dtype}


@given(problems)
def test_gradients_are_aligned_and_overlap_nowhere(problem):
    layouts, bucket_bytes, num_workers = problem
    for bucket in lay_out_buckets(layouts, bucket_bytes, num_workers):
        check_sections(bucket)


def check_sections(bucket):
    assert bucket.sections[0].extent.start == 0
    assert bucket.sections[-1].extent.stop == bucket.num_elements
    for section, next_one in pairwise(bucket.sections):
        assert section.extent.stop == next_one.extent.start
    for section in bucket.sections:
        places = [range(piece.offset, piece.offset + len(piece.elements)) for piece in section.pieces]
        places.append(range(section.flags, section.flags + len(section.pieces) + 1))
        starts = [section.extent.start + piece.offset for piece in section.pieces]
        assert all(start * bucket.dtype.itemsize % 64 == 0 for start in starts)
        assert all(one.stop <= next_one.start for one, next_one in pairwise(places))
        assert places[-1].stop <= len(section.extent)


@given(problems)
def test_shards_cover_a_bucket_once_or_each_of_them_whole(problem):
    layouts, bucket_bytes, num_workers = problem
    for bucket in lay_out_buckets(layouts, bucket_bytes, num_workers):
        assert len(bucket.shards) == num_workers
        if bucket.is_whole:
            assert set(bucket.shards) == {range(bucket.num_elements)}
        else:
            assert [i for shard in bucket.shards for i in shard] == list(range(bucket.num_elements))
            assert all(shard.start * bucket.dtype.itemsize % 64 == 0 for shard in bucket.shards)
            assert len({len(shard) for shard in bucket.shards}) == 1


@pytest.mark.parametrize("num_workers", [2, 3, 4, 7])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_bucket_is_whole_up_to_half_a_mebibyte_over_all_workers(num_workers, dtype):
    step = num_workers * 64 // dtype.itemsize
    largest = SMALL_BYTES // dtype.itemsize // num_workers // step * step
    room_for_flags = 64 // dtype.itemsize
    (bucket,) = lay_out_buckets([layout_of((largest - room_for_flags,), dtype)], 2**30, num_workers)
    assert (bucket.num_elements, bucket.is_whole) == (largest, True)
    (bucket,) = lay_out_buckets([layout_of((largest,), dtype)], 2**30, num_workers)
    assert (bucket.num_elements, bucket.is_whole) == (largest + step, False)


def test_one_worker_has_one_shard():
    (bucket,) = lay_out_buckets([layout_of((10**6,), torch.float32)], 2**30, 1)
    assert bucket.is_whole
    assert bucket.shards == (range(bucket.num_elements),)


# ---- packing -----------------------------------------------------------------------------------------


def gradient_of(layout, seed):
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(layout.shape, generator=generator, dtype=torch.float64)
    values = torch.where(values.abs() < 0.3, -0.0, values)  # a sign that sums lose easily
    return torch.empty_strided(layout.shape, layout.strides, dtype=layout.dtype).copy_(values)


def same_bits(left, right):
    as_bytes = [each.contiguous().reshape(-1).view(torch.uint8) for each in (left, right)]
    return left.dtype == right.dtype and torch.equal(*as_bytes)


def gradients_of(bucket, layouts, seed):
    return [
        None if (seed >> index) % 3 == 0 else gradient_of(layouts[index], seed + index)
        for index in bucket.parameters
    ]


def known(bucket, gradients):
    """What a worker may know of which parameters were used."""
    used = [gradient is not None for gradient in gradients]
    return dict(zip(bucket.parameters, used, strict=True)), dict.fromkeys(bucket.parameters, False)


@given(problems, st.integers(0, 2**20))
def test_what_is_packed_comes_out_with_the_same_bits(problem, seed):
    layouts, bucket_bytes, num_workers = problem
    for bucket in lay_out_buckets(layouts, bucket_bytes, num_workers):
        gradients = gradients_of(bucket, layouts, seed)
        flat = torch.full((bucket.num_elements,), 7.0, dtype=bucket.dtype)
        pack(bucket, flat, gradients)
        for knows in known(bucket, gradients):
            found = list(unpack(bucket.sections[0], flat, knows))
            assert [(each.parameter, each.start) for each in found] == [(i, 0) for i in bucket.parameters]
            for (index, _, packed), gradient in zip(found, gradients, strict=True):
                layout = layouts[index]
                assert (packed is None) == (gradient is None)
                if gradient is not None:
                    assert packed.stride() == layout.strides
                    assert same_bits(packed, gradient)
                    assert packed.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


@given(st.sampled_from(DTYPES), st.lists(st.booleans(), min_size=2, max_size=2), st.integers(0, 2**20))
def test_an_absent_gradient_adds_nothing_to_any_bit(dtype, present, seed):
    """Sums of packed buckets are sums of the gradients, −0.0 included; None only where both have none."""
    (bucket,) = lay_out_buckets([layout_of((50,), dtype)], 10**6, 3)
    gradients = [
        gradient_of(layout_of((50,), dtype), seed + n) if is_present else None
        for n, is_present in enumerate(present)
    ]
    flats = [torch.empty(bucket.num_elements, dtype=dtype) for _ in gradients]
    for flat, gradient in zip(flats, gradients, strict=True):
        pack(bucket, flat, [gradient])
    ((_, _, total),) = unpack(bucket.sections[0], (flats[0] + flats[1]) / 3, {0: False})
    held = [gradient for gradient in gradients if gradient is not None]
    if not held:
        assert total is None
    else:
        assert same_bits(total, (held[0] if len(held) == 1 else held[0] + held[1]) / 3)


def test_memory_formats_are_those_of_the_parameters():
    shapes = [(4, 3, 5, 5), (2, 3, 2, 2), (6,)]
    formats = [torch.channels_last, torch.contiguous_format, torch.contiguous_format]
    layouts = [layout_of(s, torch.float32, f) for s, f in zip(shapes, formats, strict=True)]
    (bucket,) = lay_out_buckets(layouts, 10**6, 2)
    gradients = [gradient_of(layouts[index], index).contiguous() for index in bucket.parameters]
    flat = torch.empty(bucket.num_elements)
    pack(bucket, flat, gradients)
    found = {
        index: each for index, _, each in unpack(bucket.sections[0], flat, dict.fromkeys(range(3), True))
    }
    assert found[0].is_contiguous(memory_format=torch.channels_last)
    assert all(torch.equal(found[i], g) for i, g in zip(bucket.parameters, gradients, strict=True))


def test_views_of_a_flat_tensor_that_begins_elsewhere():
    (bucket,) = lay_out_buckets([layout_of((3,), torch.float32)] * 2, 10**6, 1)
    flat = torch.arange(1000.0)[100:]
    pieces = bucket.sections[0].pieces
    assert [piece.place_in(flat).tolist() for piece in pieces] == [[100, 101, 102], [116, 117, 118]]


def test_a_bucket_of_nothing_still_travels():
    (bucket,) = lay_out_buckets([None], 10**6, 3)
    assert bucket.parameters == ()
    flat = torch.empty(bucket.num_elements)
    pack(bucket, flat, [])
    assert bucket.num_elements > 0
    assert bucket.sections[0].flags_in(flat).tolist() == []
    assert list(unpack(bucket.sections[0], flat, {})) == []


# ---- workers with shards of the averages --------------------------------------------------------------


def owners_of(layouts, num_workers, seed):
    """Cut each gradient somewhere, and give the parts to anybody."""
    owners = {}
    for index, layout in enumerate(layouts):
        if layout is not None:
            generator = torch.Generator().manual_seed(seed + index)
            cuts = torch.randint(layout.num_elements + 1, (seed % 4,), generator=generator).tolist()
            ends = sorted({0, *cuts, layout.num_elements})
            parts = [range(*ends_of) for ends_of in pairwise(ends)] or [range(0)]
            workers = torch.randint(num_workers, (len(parts),), generator=generator).tolist()
            owners[index] = list(zip(workers, parts, strict=True))
    return owners


def test_a_share_is_in_the_order_of_the_parameter_s_memory():
    layout = layout_of((4, 3, 5, 5), torch.float32, torch.channels_last)
    (whole,) = lay_out_buckets([layout], 10**6, 2)
    bucket = lay_out_shards(whole, {0: [(0, range(128)), (1, range(128, 300))]})
    gradient = gradient_of(layout, 0)
    flats = [torch.empty(bucket.num_elements) for _ in range(2)]
    pack(bucket, flats[0], [gradient])
    pack(bucket, flats[1], [gradient.contiguous()])
    (first,), (second,) = (section.pieces for section in bucket.sections)
    for flat in flats:
        own, other = (flat[section.extent.start : section.extent.stop] for section in bucket.sections)
        found = torch.cat([first.place_in(own), second.place_in(other)])
        assert torch.equal(found, gradient.as_strided((300,), (1,)))


@given(problems, st.integers(0, 2**20))
def test_each_worker_s_share_comes_out_of_its_section(problem, seed):
    layouts, bucket_bytes, num_workers = problem
    owners = owners_of(layouts, num_workers, seed)
    for whole in lay_out_buckets(layouts, bucket_bytes, num_workers):
        bucket = lay_out_shards(whole, owners)
        assert bucket.parameters == whole.parameters
        assert not bucket.is_gathered
        assert bucket.shards == tuple(section.extent for section in bucket.sections)
        check_sections(bucket)
        gradients = gradients_of(bucket, layouts, seed)
        flat = torch.full((bucket.num_elements,), 7.0, dtype=bucket.dtype)
        pack(bucket, flat, gradients)
        by_index = dict(zip(bucket.parameters, gradients, strict=True))
        for worker, section in enumerate(bucket.sections):
            own = flat[section.extent.start : section.extent.stop].clone()
            expected = [
                (index, part)
                for index in bucket.parameters
                for owner, part in owners[index]
                if owner == worker
            ]
            for knows in known(bucket, gradients):
                found = list(unpack(section, own, knows))
                assert [each[:2] for each in found] == [(index, part.start) for index, part in expected]
                for (index, part), each in zip(expected, found, strict=True):
                    gradient = by_index[index]
                    assert (each.gradient is None) == (gradient is None)
                    if gradient is not None:
                        in_memory = gradient.as_strided((gradient.numel(),), (1,))[part.start : part.stop]
                        packed = each.gradient
                        flat_of_it = packed.as_strided((packed.numel(),), (1,), packed.storage_offset())
                        assert same_bits(flat_of_it, in_memory)
