"""The paged cache: what sequences read is what they wrote, whatever is shared, given back, copied or undone."""

import random

import numpy as np
import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from kpt_attention import attention, causal, dense_mask, sliding_window
from kpt_attention.kv_cache import CacheFullError, PagedCache
from kpt_attention.masks import global_tokens
from kpt_attention.paged import paged
from kpt_core import InputError, use

HEADS, DIM, SIZE = 2, 4, 4
#: Of a cache with and without a window: some steps do not fit.
PAGES = {0: 14, 6: 6}


def rows_of(tokens: list[int]) -> torch.Tensor:
    """Return keys and values that say which tokens there are, and at which place, `[tokens, heads, dim]`."""
    places = torch.arange(len(tokens), dtype=torch.float64)
    seed = torch.tensor(tokens, dtype=torch.float64) * 1.7 + places * 0.31
    return torch.sin(seed[:, None, None] * torch.arange(1, HEADS * DIM + 1).view(HEADS, DIM))


def poison(cache: PagedCache) -> None:
    """Overwrite each page that no sequence holds and that nobody may find again."""
    for page in cache._free:
        cache.k[:, page] = cache.v[:, page] = torch.nan


class Checked:
    """A cache beside a plain list of tokens for each sequence."""

    def __init__(self, window: int, first: int, seed: int) -> None:
        self.window, self.first, self.random = window, first, random.Random(seed)
        self.cache = PagedCache(
            layers=1,
            pages=PAGES[window],
            kv_heads=HEADS,
            head_dim=DIM,
            page_size=SIZE,
            window=window,
            first=first,
            dtype=torch.float64,
        )
        self.texts: dict[int, list[int]] = {}
        self.full = self.shared = 0

    def run(self, new: dict[int, list[int]], fails: bool = False) -> None:
        """Take a step, and compare each query's output with attention over the plain list."""
        try:
            with self.cache.step(new) as step:
                poison(self.cache)
                whole = {number: self.texts[number] + new[number] for number in new}
                rows = torch.cat([rows_of(whole[number])[len(self.texts[number]) :] for number in new])
                step.update(0, rows, rows.flip(-1))
                q = rows.repeat_interleave(2, 1) + 0.1
                out = step.attend(0, q)
                self.compare(new, whole, q, out)
                if fails:
                    raise RuntimeError("the model failed")
        except CacheFullError:
            self.full += 1
            return
        except RuntimeError:
            return
        self.texts.update(whole)

    def compare(self, new, whole, q, out) -> None:
        first = 0
        for number in new:
            count, keys = len(new[number]), rows_of(whole[number]).repeat_interleave(2, 1).transpose(0, 1)
            back = torch.arange(len(whole[number]) - count, len(whole[number]))[:, None] - torch.arange(keys.shape[1])
            near = (back < (self.window or 10**6)) | (torch.arange(keys.shape[1]) < self.first)
            mask = (back >= 0) & near
            own = q[first : first + count].transpose(0, 1)
            wanted = scaled_dot_product_attention(own, keys, keys.flip(-1), mask).transpose(0, 1)
            torch.testing.assert_close(out[first : first + count], wanted)
            first += count

    def act(self) -> None:
        """Do something at random that a server does."""
        pick = self.random
        action = pick.choice(["add", "add", "step", "step", "step", "step", "fork", "free", "cut", "fail"])
        numbers = list(self.texts)
        if action == "add" or not numbers:
            tokens = [pick.randrange(3) for _ in range(pick.randrange(20))]
            if numbers and pick.random() < 0.7:
                other = self.texts[pick.choice(numbers)]
                tokens = other[: pick.randrange(len(other) + 1)] + tokens[:3]
            number = self.cache.add(tokens)
            there = self.cache.length(number)
            self.shared += there
            assert there <= max(len(tokens) - 1, 0)
            self.texts[number] = tokens[:there]
            if len(tokens) > there:
                self.run({number: tokens[there:]})
        elif action in ("step", "fail"):
            some = pick.sample(numbers, pick.randrange(1, len(numbers) + 1))
            self.run({each: [pick.randrange(3) for _ in range(pick.randrange(4))] for each in some}, action == "fail")
        elif action == "fork":
            number = pick.choice(numbers)
            self.texts[self.cache.fork(number)] = [*self.texts[number]]
        elif action == "free":
            self.cache.free(number := pick.choice(numbers))
            del self.texts[number]
        else:
            number = pick.choice(numbers)
            length = max(len(self.texts[number]) - pick.randrange(6), 0)
            try:
                self.cache.truncate(number, length)
            except InputError:
                assert self.window
            else:
                self.texts[number] = self.texts[number][:length]

    def account(self) -> None:
        """Compare what the cache counts with what its sequences hold."""
        held = [page for own in self.cache._sequences.values() for page in own.pages if page >= 0]
        usage = self.cache.usage()
        assert usage.free + usage.kept + usage.used == PAGES[self.window]
        assert usage.used == len({*held})
        assert usage.shared == sum(held.count(page) > 1 for page in {*held})
        assert not {*held} & {*self.cache._free}
        for number, text in self.texts.items():
            assert self.cache.length(number) == len(text)
            pages = -(-len(text) // SIZE)
            before = max(len(text) + 1 - self.window, 0) // SIZE if self.window else 0
            visible = pages - before + min(-(-self.first // SIZE), before)
            assert sum(page >= 0 for page in self.cache._of(number).pages) == max(visible, 0)


@pytest.mark.parametrize(("window", "first"), [(0, 0), (6, 0), (6, 3)])
def test_a_cache_is_a_list_of_tokens_for_each_sequence(window, first):
    full = shared = 0
    for seed in range(100):
        checked = Checked(window, first, seed)
        for _ in range(12):
            checked.act()
            checked.account()
        full, shared = full + checked.full, shared + checked.shared
        for number in [*checked.texts]:
            checked.cache.free(number)
        assert checked.cache.usage().used == 0
    assert full > 5  # steps that did not fit
    assert shared > 50  # tokens that were there already


def test_what_begins_alike_is_computed_once_and_given_up_when_room_is_short():
    cache = PagedCache(layers=2, pages=4, kv_heads=1, head_dim=2, page_size=2)
    one = cache.add([1, 2, 3, 4, 5])
    with cache.step({one: [1, 2, 3, 4, 5]}) as step:
        assert step.positions.tolist() == [0, 1, 2, 3, 4]
    two = cache.add([1, 2, 3, 4])
    assert cache.length(two) == 2  # a token is left to compute
    assert cache.length(cache.add([1, 2, 9, 4, 5])) == 2
    assert cache.usage().shared == 1
    for number in (0, 1, 2):
        cache.free(number)
    assert (cache.usage().kept, cache.usage().free) == (2, 2)
    with cache.step({cache.add(): 7}):
        pass
    assert (cache.usage().kept, cache.usage().used) == (0, 4)
    assert cache.length(cache.add([1, 2, 3, 4, 5])) == 0


def test_a_fork_copies_a_page_when_it_writes_and_a_failed_step_leaves_all_as_it_was():
    cache = PagedCache(layers=1, pages=4, kv_heads=1, head_dim=2, page_size=4)
    one = cache.add()
    with cache.step({one: 3}) as step:
        step.update(0, torch.ones(3, 1, 2), torch.ones(3, 1, 2))
    two = cache.fork(one)
    assert cache.usage().used == 1
    with pytest.raises(InputError, match="one dtype"), cache.step({two: 1}) as step:
        step.update(0, torch.zeros(1, 1, 2), torch.zeros(2, 1, 2))
    assert (cache.usage().used, cache.usage().shared, cache.length(two)) == (1, 1, 3)
    with cache.step({two: 1}) as step:
        step.update(0, torch.zeros(1, 1, 2), torch.zeros(1, 1, 2))
        assert step.attend(0, torch.zeros(1, 1, 2)).tolist() == [[[0.75, 0.75]]]
    assert (cache.usage().used, cache.usage().shared) == (2, 0)
    with cache.step({one: 1}) as step:
        step.update(0, torch.full((1, 1, 2), 5.0), torch.full((1, 1, 2), 5.0))
        assert step.attend(0, torch.zeros(1, 1, 2)).tolist() == [[[2.0, 2.0]]]


def test_a_window_over_pages_is_as_wide_after_a_prefix_that_was_there():  # transformers#41184
    cache = PagedCache(layers=1, pages=9, kv_heads=1, head_dim=2, page_size=7, window=4)
    ids, seen, firsts = list(range(16)), torch.arange(1, 17).clamp(max=4), []
    for request in (ids[:8], ids, ids):
        one = cache.add(request)
        first = cache.length(one)
        firsts.append(first)
        rows = torch.ones(len(request) - first, 1, 2)
        with cache.step({one: request[first:]}) as step:
            step.update(0, 0 * rows, rows)
            _, lse = step.attend(0, rows, return_lse=True)
        torch.testing.assert_close(lse[:, 0].exp(), seen[first : len(request)].float())
    assert firsts == [0, 7, 14]


def test_the_first_keys_stay_beside_a_window_and_the_pages_between_are_given_back():
    cache = PagedCache(layers=1, pages=6, kv_heads=1, head_dim=4, page_size=4, window=5, first=3, dtype=torch.float64)
    one, k, q = cache.add(), *torch.randn(2, 40, 1, 4, dtype=torch.float64)
    out = []
    for begin in range(0, 40, 2):
        with cache.step({one: 2}) as step:
            step.update(0, k[begin : begin + 2], k[begin : begin + 2])
            out.append(step.attend(0, q[begin : begin + 2]))
        poison(cache)
    assert cache.usage().used == 2  # that of the first keys, and the window's
    q, k = (each.transpose(0, 1)[None] for each in (q, k))
    wanted = attention(q, k, k, causal() & (sliding_window(5) | global_tokens(3)))
    torch.testing.assert_close(torch.cat(out), wanted[0].transpose(0, 1))


@pytest.mark.parametrize("kernel", ["torch", "reference"])
def test_trees_of_guessed_tokens_see_what_each_of_their_paths_alone_would(kernel):
    cache = PagedCache(layers=1, pages=20, kv_heads=1, head_dim=4, page_size=4, dtype=torch.float64)
    one, two = cache.add(), cache.add()
    k, q = torch.randn(2, 17, 1, 4, dtype=torch.float64)
    with cache.step({one: 9, two: 1}) as step:
        step.update(0, k[:10], k[:10])
    parents = [[-1, 0, 0, 1, -1], torch.tensor([-1, 0])]
    paths = [[0], [0, 1], [0, 2], [0, 1, 3], [4]], [[0], [0, 1]]
    with cache.step({one: 5, two: 2}) as step, use(kernel, op="attention.paged"):
        step.update(0, k[10:], k[10:])
        mask, positions = step.tree(parents)
        out = step.attend(0, q[10:], mask=mask)
    assert positions.tolist() == [9, 10, 10, 11, 9, 1, 2]
    row = 0
    for own, prefix, new in ((paths[0], k[:9], k[10:15]), (paths[1], k[9:10], k[15:])):
        for path in own:
            keys = torch.cat((prefix, new[path])).transpose(0, 1)
            wanted = scaled_dot_product_attention(q[10 + row].unsqueeze(0), keys, keys)
            torch.testing.assert_close(out[row], wanted[0])
            row += 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float8_e4m3fn], ids=str)
def test_the_path_that_was_right_is_kept_of_a_tree(dtype):
    cache = PagedCache(layers=2, pages=9, kv_heads=1, head_dim=4, page_size=4, dtype=dtype)
    one, k = cache.add(), torch.randn(13, 1, 4)
    for begin, end in ((0, 6), (6, 13)):
        with cache.step({one: end - begin}) as step:
            for layer in range(2):
                rows = (k[begin:end] * (layer + 1)).to(torch.float32 if dtype.itemsize == 1 else dtype)
                step.update(layer, rows, rows + 1)
    cache.keep(one, 6, [6, 8, 11, 12])
    assert (cache.length(one), cache.usage().used) == (10, 3)
    pages = cache._of(one).pages
    for layer in range(2):
        wanted = k[[0, 1, 2, 3, 4, 5, 6, 8, 11, 12]] * (layer + 1)
        for part, more in ((cache.k, 0), (cache.v, 1)):
            got = part[layer].float()[pages].flatten(0, 1)[:10]
            torch.testing.assert_close(got, (wanted + more).to(dtype).float())
    cache.fork(one)
    for length, places, message in (
        (4, [5, 5], r"places must rise from 4 on, 0 at least, and be less than 10; got \[5, 5\]"),
        (4, [9, 10], "be less than 10"),
        (8, [7], "rise from 8 on"),
        (8, [9], "keys 8 to 8 lie in a page that others hold"),
    ):
        with pytest.raises(InputError, match=message):
            cache.keep(one, length, places)
    cache.keep(one, 8, [8])  # nothing moves
    assert cache.length(one) == 9
    two = cache.add()
    with cache.step({two: [5, 6, 7]}):
        pass
    with pytest.raises(InputError, match=r"the ids of keys 1 to 2 of sequence 2 are known, .* give steps"):
        cache.keep(two, 1, [2])


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([[-1, 0]], r"parents must be of \[2, 1\] new tokens, by sequence; got \[2\]"),
        ([[-1, 1], [-1]], r"parent of token 1 must come before it, or be -1; got 1"),
    ],
)
def test_parents_that_are_none_are_refused(parents, message):
    cache = PagedCache(layers=1, pages=4, kv_heads=1, head_dim=4)
    with pytest.raises(InputError, match=message), cache.step({cache.add(): 2, cache.add(): 1}) as step:
        step.tree(parents)


NEW = {
    "alibi_slopes": {"alibi_slopes": torch.full((3, 4), 0.3)},
    "bias": {"bias": torch.randn(4, 5, 11)},
    "mask": {"mask": torch.rand(5, 3) < 0.5},
    "first": {"window": 3, "first": 2},
}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("one", NEW)
@pytest.mark.parametrize("other", NEW)
def test_slopes_biases_masks_and_first_keys_are_those_of_dense_attention(one, other, dtype):
    changes, cache = NEW[one] | NEW[other], torch.randn(7, 4, 2, 6).to(dtype)
    table = torch.tensor([[3, 0, 6], [1, 5, 2], [4, 4, 4]], dtype=torch.int32)
    lengths, ends = torch.tensor([11, 7, 0], dtype=torch.int32), torch.tensor([0, 2, 5, 5], dtype=torch.int32)
    q = torch.randn(5, 4, 6).to(dtype)
    with use("torch", op="attention.paged"):
        out, lse = paged(q, cache, cache, table, lengths, ends, return_lse=True, **changes)
    plain = paged.reference(q, cache, cache, table, lengths, ends)[0]
    assert not torch.allclose(out, plain, atol=1e-3)
    for number, rows in ((0, slice(0, 2)), (1, slice(2, 5))):
        length = int(lengths[number])
        keys = cache[table[number].long()].flatten(0, 1)[:length].transpose(0, 1)[None]
        place = torch.arange(length)
        at = place[length - (rows.stop - rows.start) :, None]
        seen = place <= at
        if "mask" in changes:
            seen = torch.cat((torch.ones(len(at), length - 3, dtype=torch.bool), changes["mask"][rows]), 1)
        if "first" in changes:
            seen = seen & ((place > at - 3) | (place < 2))
        bias = changes["bias"][None, :, rows, :length] if "bias" in changes else None
        slopes = changes["alibi_slopes"][number] if "alibi_slopes" in changes else None
        wanted, sums = attention(
            q[rows].transpose(0, 1)[None], keys, keys, dense_mask(seen), bias=bias, alibi_slopes=slopes, return_lse=True
        )
        torch.testing.assert_close(out[rows], wanted[0].transpose(0, 1))
        torch.testing.assert_close(lse[rows], sums[0].transpose(0, 1))


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16])
def test_caches_of_fewer_bits_hold_what_these_can_say(dtype):
    generator = torch.Generator().manual_seed(0)
    scale = torch.tensor([[0.02, 0.03]])
    cache = PagedCache(layers=1, pages=3, kv_heads=2, head_dim=8, dtype=dtype, k_scale=scale, v_scale=scale * 2)
    k, v, q = (torch.randn(20, heads, 8, generator=generator).to(torch.bfloat16) for heads in (2, 2, 4))
    one = cache.add()
    with cache.step({one: 20}) as step:
        step.update(0, k, v)
        out, lse = step.attend(0, q, return_lse=True)
    stored = [(each / s[0, :, None]).to(dtype).float() * s[0, :, None] for each, s in ((k, scale), (v, scale * 2))]
    heads = [each.double().transpose(0, 1)[None] for each in (q, *stored)]
    wanted, sums = attention(*heads, causal(), return_lse=True)
    torch.testing.assert_close(out.double(), wanted[0].transpose(0, 1), atol=2e-2, rtol=2e-2)
    torch.testing.assert_close(lse.double(), sums[0].transpose(0, 1), atol=1e-2, rtol=1e-2)
    assert cache.k.element_size() == dtype.itemsize


@pytest.mark.parametrize("count", [np.int64(3), torch.tensor(3)])
def test_counts_may_be_of_numpy_and_torch(count):
    cache = PagedCache(layers=1, pages=4, kv_heads=1, head_dim=4)
    one = cache.add()
    with cache.step({one: count}) as step:
        assert step.positions.tolist() == [0, 1, 2]
    assert cache.length(one) == 3


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (lambda cache: PagedCache(layers=1, pages=0, kv_heads=1, head_dim=4), "pages must be at least 1; got 0"),
        (lambda cache: PagedCache(layers=1, pages=1, kv_heads=1, head_dim=4, window=-2), "window must be positive"),
        (
            lambda cache: PagedCache(layers=1, pages=1, kv_heads=1, head_dim=4, first=2),
            "first must be positive, beside a window, or 0 for none; got 2 with window=0",
        ),
        (
            lambda cache: PagedCache(layers=1, pages=1, kv_heads=1, head_dim=4, dtype=torch.int8),
            "dtype must be float32",
        ),
        (
            lambda cache: PagedCache(layers=2, pages=1, kv_heads=1, head_dim=4, k_scale=torch.ones(2)),
            r"k_scale must be float32 \[2, 1\]; got torch\.float32 \[2\]",
        ),
        (lambda cache: cache.length(7), r"there is no sequence 7; there are \[0\]"),
        (lambda cache: cache.truncate(0, 9), "sequence 0 has 5 keys; it can't be cut to 9"),
        (lambda cache: cache.truncate(0, 1), "can't be cut to 1 keys: those in the window of 2 before are given back"),
        (lambda cache: cache.step({0: -1}).__enter__(), "new tokens must be counts or lists of ids"),
        (lambda cache: cache.step({0: 1.5}).__enter__(), "new tokens without ids must be an integer; got 1.5"),
        (lambda cache: cache.step({0: 50}).__enter__(), "needs 12 pages of 4 tokens, and 3 of 4 are free: free"),
        (
            lambda cache: [step := cache.step({0: 1}), step.__enter__(), cache.free(0)],
            "free inside of a step: end the step first",
        ),
    ],
)
def test_wrong_use_is_a_sentence(action, message):
    cache = PagedCache(layers=1, pages=4, kv_heads=1, head_dim=4, page_size=4, window=2)
    one = cache.add()
    with cache.step({one: 5}):
        pass
    with pytest.raises((InputError, CacheFullError), match=message):
        action(cache)
