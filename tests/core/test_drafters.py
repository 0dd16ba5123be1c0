"""Drafters of the core: what they propose for which texts, how much they search, and whose texts they use."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from headrace.core.options.speculation import NgramSpeculation, SuffixSpeculation
from headrace.core.schedule.drafters import drafter_of
from headrace.core.schedule.drafters.drafter import Drafter
from headrace.core.schedule.drafters.past_outputs import PastOutputs
from headrace.core.schedule.drafters.step_costs import MOST_NEEDED, SHORTEST_S, StepCosts
from headrace.core.schedule.drafters.token_index import MOST_ADDED
from headrace.core.schedule.requests import Request, RowTable
from headrace.ipc.messages import Generate, Sampling
from headrace.ipc.prefix_names import PrefixKey
from headrace.ipc.step import StepResult


class Texts:
    """A drafter over rows whose texts the test writes."""

    def __init__(self, drafter: Drafter, num_rows: int = 1, max_model_len: int = 1000) -> None:
        self.drafter, self.table = drafter, RowTable(num_rows, max_model_len)
        drafter.bind(self.table)

    def enter(self, tokens: list[int], salt: str = "", num_prompt_tokens: int | None = None) -> int:
        """Begins a request in a free row, and returns the row."""
        prompt = np.array(tokens, np.int32)
        request = Request(
            client=0, slot=0, request_id="", token_ids=prompt, task=Generate(sampling=Sampling(max_tokens=9)), seed=0
        )
        request.prefix_key = PrefixKey(salt)
        request.num_prompt_tokens = len(tokens) if num_prompt_tokens is None else num_prompt_tokens
        row = self.table.enter(request, self.table.token_ids.shape[1], 0)
        self.drafter.pacing.begin(row)  # type: ignore[attr-defined]
        self.drafter._texts.begin(row)  # type: ignore[attr-defined]
        return row

    def extend(self, row: int, tokens: list[int]) -> None:
        known = int(self.table.num_known_tokens[row])
        self.table.token_ids[row, known : known + len(tokens)] = tokens
        self.table.num_tokens[row] = self.table.num_known_tokens[row] = known + len(tokens)

    def leave(self, row: int) -> None:
        self.drafter.leave(row)
        self.table.leave(row)

    def draft(self, row: int, limit: int = 8) -> list[int]:
        self.drafter.look_up(np.array([row], np.int64))
        return self.drafter.propose(row, limit).tolist()


def ngram(num_rows: int = 1, max_model_len: int = 1000, **changes: Any) -> Texts:
    values = {"num_speculative_tokens": 8, "prompt_lookup_max": 3, "prompt_lookup_min": 2, **changes}
    return Texts(drafter_of(NgramSpeculation(**values)), num_rows, max_model_len)


def suffix(num_rows: int = 1, max_model_len: int = 1000, **changes: Any) -> Texts:
    return Texts(drafter_of(SuffixSpeculation(**{"num_speculative_tokens": 24, **changes})), num_rows, max_model_len)


def share_slots(texts: Texts, runs: list[list[int]]) -> bool:
    """Whether different runs of row 0 have the same slot of the index."""
    index = texts.drafter._texts.index  # type: ignore[attr-defined]
    row = np.zeros(1, np.uint64)
    hashes = {int(index._hashes(np.array([run], np.uint64), len(run), row)[0]) for run in runs}
    return len({int(index._slots(np.uint64(each))) for each in hashes}) < len(hashes)


# --- n-gram -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tokens", "expected"),
    [
        ([1, 2, 3, 4, 5, 6, 2, 3], [4, 5, 6, 2, 3, 4, 5, 6]),  # goes on where the run stands, in circles at its end
        ([1, 2, 3, 9, 7, 2, 3, 8, 1, 2, 3], [9, 7, 2, 3, 8, 1, 2, 3]),  # the longer run counts, not the later one
        ([2, 3, 9, 7, 2, 3, 8, 1, 2, 3], [8, 1, 2, 3, 8, 1, 2, 3]),  # of equally long ones the later
        ([1, 2, 3, 4, 9, 3], []),  # one token alone is not enough
        ([5, 5, 5], [5] * 8),
        ([7], []),
        ([7, 7], []),
    ],
)
def test_a_draft_is_what_followed_the_longest_run_of_the_last_tokens(tokens: list[int], expected: list[int]) -> None:
    texts = ngram()
    assert texts.draft(texts.enter(tokens)) == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=60), st.integers(1, 3), st.integers(0, 3), st.integers(1, 60))
def test_a_draft_follows_as_long_a_run_as_there_is(tokens: list[int], fewest: int, more: int, first: int) -> None:
    """Wherever the index was brought up to date before. Of runs that share a slot of the table, one is lost."""
    most = fewest + more
    texts = ngram(prompt_lookup_min=fewest, prompt_lookup_max=most, max_model_len=100)
    row = texts.enter(tokens[:first])
    texts.drafter.look_up(np.array([row]))
    texts.extend(row, tokens[first:])
    assume(
        not share_slots(
            texts, [tokens[end - n : end] for n in range(fewest, most + 1) for end in range(n, len(tokens))]
        )
    )
    draft = texts.draft(row, 1)
    runs = {
        length: [tokens[end] for end in range(length, len(tokens)) if tokens[end - length : end] == tokens[-length:]]
        for length in range(fewest, min(most, len(tokens) - 1) + 1)
    }
    longest = max((length for length, nexts in runs.items() if nexts), default=None)
    assert draft == ([] if longest is None else runs[longest][-1:])


def test_a_copy_goes_on_where_it_is_though_the_same_words_stand_elsewhere() -> None:
    text = [1, 2, 3, 4, 8, 9, 2, 3, 4, 7]
    texts = ngram()
    row = texts.enter([*text, 1, 2])
    assert texts.draft(row, 1) == [3]
    texts.extend(row, [3])
    assert texts.draft(row, 1) == [4]
    texts.extend(row, [4])
    assert texts.draft(row, 1) == [8]
    texts = ngram()
    assert texts.draft(texts.enter([*text, 1, 2, 3, 4]), 1) == [7]  # of one that begins here


def test_rows_never_get_drafts_from_each_other_or_from_the_request_before_in_their_row() -> None:
    texts = ngram(num_rows=2)
    first = texts.enter([1, 2, 3, 4, 5, 6])
    assert texts.draft(texts.enter([9, 1, 2, 3])) == []
    assert texts.draft(first) == []
    texts.leave(first)
    again = texts.enter([9, 9, 1, 2, 3])
    assert again == first
    assert texts.draft(again) == []


@pytest.mark.parametrize("make", [ngram, suffix])
def test_a_step_adds_only_so_many_tokens_to_the_index_and_all_are_found_in_the_end(make: Any) -> None:
    length = 3 * MOST_ADDED
    texts = make(2, 8 * length)
    rows = []
    for first in (0, length):
        run = [first + 10, first + 11, first + 12]
        rows.append(texts.enter([*range(first, first + length), *run]))
    added = texts.drafter._texts._added
    for nth in range(1, 9):
        texts.drafter.look_up(np.array(rows))
        assert added.sum() <= nth * (MOST_ADDED + 16)
    for row, first in zip(rows, (0, length), strict=True):
        assert texts.draft(row, 3)[:2] == [first + 13, first + 14]


def test_an_index_that_is_far_too_small_only_loses_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.core.schedule.drafters.row_texts.MOST_SLOTS", 64)
    dice = np.random.default_rng(0)
    texts = ngram(4, 600, prompt_lookup_min=1)
    num_found = 0
    for _ in range(40):
        tokens = dice.integers(0, 5, 500).tolist()
        row = texts.enter(tokens)
        if draft := texts.draft(row, 1):
            num_found += 1
            assert any([*tokens[at : at + 2]] == [tokens[-1], *draft] for at in range(499))
        texts.leave(row)
    assert num_found


# --- suffix -------------------------------------------------------------------------------------------------------


def test_a_draft_follows_a_past_output_and_is_as_long_as_its_match() -> None:
    texts = suffix()
    output = list(range(100, 130))
    first = texts.enter([1, 2, 3, *output], num_prompt_tokens=3)
    texts.leave(first)
    row = texts.enter([50, 51, 102, 103, 104])
    assert texts.draft(row, 24) == [105, 106, 107]
    texts.extend(row, [105, 106, 107])
    assert texts.draft(row, 24) == [108, 109, 110, 111, 112, 113]
    assert texts.draft(row, 2) == [108, 109]
    texts.leave(row)
    row = texts.enter([7, 1, 2, 3])  # the end of a prompt counts, so that a repeated question finds its answer
    assert texts.draft(row, 24) == [100, 101, 102]


def test_the_factor_of_the_match_and_the_end_of_the_text_limit_a_draft() -> None:
    for factor, expected in ((2.0, 6), (0.5, 1), (0.1, 0), (9.0, 20)):
        texts = suffix(max_spec_factor=factor)
        texts.leave(texts.enter([1, 2, 3, *range(100, 120)], num_prompt_tokens=3))
        assert len(texts.draft(texts.enter([9, 1, 2, 3]), 24)) == expected


def test_past_outputs_are_those_of_the_same_salt() -> None:
    texts = suffix(2)
    texts.leave(texts.enter([1, 2, 3, *range(100, 120)], salt="a", num_prompt_tokens=3))
    for salt, expected in (("b", []), ("", []), ("a", [100, 101, 102])):
        row = texts.enter([9, 1, 2, 3], salt=salt)
        assert texts.draft(row, 24) == expected, salt
        texts.leave(row)


def test_without_cached_requests_only_the_row_itself_is_searched() -> None:
    for most, expected in ((0, []), (1, [100, 101, 102])):
        texts = suffix(max_cached_requests=most)
        texts.leave(texts.enter([1, 2, 3, *range(100, 120)], num_prompt_tokens=3))
        row = texts.enter([9, 1, 2, 3])
        assert texts.draft(row) == expected
        texts.extend(row, [9, 1, 2, 3])
        assert texts.draft(row)[:1] == [9]


def test_a_draft_ends_where_its_runs_went_on_in_many_ways() -> None:
    tokens = [token for nth in range(30) for token in (1, 2, 3, 4, 5, 100 + nth)]
    for least, expected in ((0.1, [4, 5]), (0.0, [4, 5, 129, 1, 2, 3, 4, 5])):
        texts = suffix(min_token_prob=least, max_spec_factor=9.0)
        assert texts.draft(texts.enter([*tokens, 1, 2, 3]), 8) == expected


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_ring_of_past_outputs_forgets_the_oldest_and_continues_as_its_texts_do(data: st.DataObject) -> None:
    past, lengths = PastOutputs((2, 3), most_texts=data.draw(st.integers(1, 6)), ring_tokens=64), (2, 3)
    kept: list[tuple[str, list[int]]] = []
    for _ in range(data.draw(st.integers(1, 25))):
        salt = data.draw(st.sampled_from(["a", "b"]))
        text = data.draw(st.lists(st.integers(0, 4), min_size=1, max_size=24))
        past.add(np.array(text, np.int32), salt)
        past.update()
        kept.append((salt, text[-16:]))
        for asked in ("a", "b"):
            runs = np.array([[*[9] * 3, *text[-3:]][-3:]], np.uint64)
            room = np.array([min(3, len(text))])
            for length in lengths:
                place = int(past.find(runs, room, np.array([past.owner(asked)], np.uint64), length)[0])
                if not place:
                    continue
                run = text[-length:]
                draft = past.after(place, 5).tolist()
                assert draft
                whole = [*run, *draft]
                assert any(
                    salt == asked and whole == each[at : at + len(whole)]
                    for salt, each in kept
                    for at in range(len(each))
                )
    assert sum(size for _, size in past._salts.values()) == len(past._texts) <= past._most_texts
    places = np.flatnonzero(past._ring >= 0)
    assert len(places) == sum(text.size for text in past._texts)


def test_the_latest_of_equal_runs_and_the_longest_of_all_is_continued() -> None:
    texts = suffix()
    texts.leave(texts.enter([8, 8, 8, 8, 1, 2, 3, 4, 5, 60, 61, 62], num_prompt_tokens=0))
    row = texts.enter([1, 2, 3, 70, 71, 72, 9, 1, 2, 3])
    assert texts.draft(row)[:1] == [70]  # its own text is as good as a past one
    texts.leave(row)
    row = texts.enter([3, 4, 5, 70, 71, 72, 1, 2, 3, 4, 5])
    assert texts.draft(row)[:1] == [60]  # five tokens of a past output beat three of its own


# --- when a row is searched ---------------------------------------------------------------------------------------


def test_rows_in_which_nothing_is_found_are_searched_in_the_same_steps() -> None:
    texts = ngram(num_rows=4)
    rows = np.array([texts.enter([100 * row + at for at in range(9)]) for row in range(4)])
    searched = []
    for step in range(60):
        for row in rows.tolist():
            texts.extend(row, [1000 * row + step + 10])
        late = rows[rows <= step // 7]  # they begin one after another
        wants = texts.drafter.wants(late)
        texts.drafter.look_up(late[wants])
        searched.append(int(wants.sum()))
    assert set(searched[30:]) == {0, 4}
    assert searched[30:].count(4) == 10


def test_a_row_whose_drafts_were_wrong_rests_whatever_others_do() -> None:
    texts = ngram(num_rows=2)
    rows = np.array([texts.enter([at % 5 for at in range(20)]), texts.enter(list(range(100, 120)))])
    assert texts.draft(0)
    texts.drafter.judged(rows[:1], np.array([4]), np.array([0]))
    assert texts.drafter.wants(rows).tolist() == [False, True]


# --- what drafts are worth ----------------------------------------------------------------------------------------


class Steps:
    """Steps of one row, each of which begins when the one before has ended."""

    def __init__(self) -> None:
        self.costs, self.step, self.now_s = StepCosts(), 0, 1.0

    def run(self, num_tokens: int, num_new: int, seconds: float, *, idle_s: float = 0.0, decodes: bool = True) -> None:
        if decodes:
            self.costs.planned(self.step, num_tokens)
        began_s = self.now_s + idle_s
        self.now_s = began_s + seconds
        tokens = np.zeros(num_new, np.int32)
        self.costs.take(
            StepResult(step=self.step, rows=tokens[:1], token_ids=tokens, began_s=began_s, ended_s=self.now_s)
        )
        self.step += 1


def test_a_draft_token_is_worth_its_time_from_a_probability_on_that_its_cost_decides() -> None:
    for token_s in (0.0, 0.001, 0.004):
        steps = Steps()
        assert steps.costs.least_likely == 0
        for _ in range(400):
            steps.run(1, 1, 0.010)
            steps.run(5, 3, 0.010 + 4 * token_s)
        assert steps.costs.least_likely == pytest.approx(
            min(MOST_NEEDED, token_s * 4 / (0.020 + 4 * token_s)), rel=0.05
        )


def test_the_time_between_two_decodes_counts_and_that_before_a_prompt_does_not() -> None:
    found = []
    for idle_s, between_s in ((0.0, 0.0), (5.0, 0.0), (0.0, 0.004)):
        steps = Steps()
        for _ in range(200):
            steps.run(20, 1, 0.1, idle_s=idle_s, decodes=False)
            steps.run(1, 1, 0.010)
            steps.run(5, 3, 0.014, idle_s=between_s)
        found.append(steps.costs.least_likely)
    assert found[1] == pytest.approx(found[0])
    assert found[2] > 1.5 * found[0]


def test_repeated_decodes_count_by_their_number_and_the_time_between_the_results_around_them() -> None:
    seen, told = Steps(), Steps()
    for _ in range(100):
        for steps in (seen, told):
            steps.run(1, 1, 0.012)
            steps.run(9, 6, 0.030)
        for _ in range(4):
            told.run(1, 1, 0.008)
        seen.step, seen.now_s = seen.step + 4, seen.now_s + 4 * 0.008
    assert seen.costs.least_likely == pytest.approx(told.costs.least_likely, rel=0.02)


def test_what_lies_before_a_prompt_is_no_repeated_decode() -> None:
    found = []
    for num_between, idle_s in ((0, 0.0), (6, 5.0)):
        steps = Steps()
        for _ in range(100):
            steps.step += num_between
            steps.run(20, 1, 0.1, idle_s=idle_s, decodes=False)
            steps.run(1, 1, 0.010)
            steps.run(5, 3, 0.014)
        found.append(steps.costs.least_likely)
    assert found[1] == pytest.approx(found[0])


def test_steps_of_a_rank_that_tells_no_times_or_hardly_works_count_nothing() -> None:
    for seconds in (0.0, 0.9 * SHORTEST_S):
        steps = Steps()
        for _ in range(50):
            steps.run(1, 1, seconds)
            steps.run(9, 9, seconds * 9 / 10)
        assert steps.costs.least_likely == 0


def test_only_drafts_that_are_likely_enough_are_made_and_others_are_tried_again_after_a_while() -> None:
    texts = ngram()
    copied = list(range(100, 190))
    row = texts.enter([*copied, 5, 6, 1, *copied[:2]])
    drafter, table = texts.drafter, texts.table
    sizes = []
    for at in range(2, 80, 8):  # a copy that goes on: right every time
        drafter.look_up(np.array([row]))
        draft = drafter.propose(row, 8, 0.5)
        sizes.append(len(draft))
        texts.extend(row, copied[at : at + 8])
        drafter.judged(np.array([row]), np.array([len(draft)]), np.array([len(draft)]))
    assert sizes[-1] == 8
    assert draft.tolist() == copied[at : at + 8]
    tried = []
    for nth in range(80):  # new runs, which go on otherwise
        texts.extend(row, copied[nth : nth + 2])
        drafter._distance[row] = 0  # type: ignore[attr-defined]
        drafter.look_up(np.array([row]))
        tried.append(len(drafter.propose(row, 8, 0.5)))
        if tried[-1]:
            drafter.judged(np.array([row]), np.array(tried[-1:]), np.array([0]))
        else:
            assert drafter.pacing.due_at[row] > table.num_tokens[row]  # type: ignore[attr-defined]
    assert 0 < sum(map(bool, tried[40:])) < 20


def test_a_past_output_is_followed_as_far_as_it_is_worth() -> None:
    texts = suffix()
    output = list(range(100, 160))
    texts.leave(texts.enter([1, 2, 3, *output], num_prompt_tokens=3))
    row = texts.enter([50, *output[:8]])
    lengths = []
    for least in (0.0, 0.5, 0.9, 0.95):
        texts.drafter.look_up(np.array([row]))
        lengths.append(len(texts.drafter.propose(row, 8, least)))
    assert lengths == [8, 7, 1, 0]


# --- settings far beyond what a row holds -------------------------------------------------------------------------


def test_lookup_lengths_beyond_a_row_cost_no_more_than_a_row() -> None:
    text = list(range(10)) * 3
    far = ngram(max_model_len=64, prompt_lookup_min=2, prompt_lookup_max=1 << 62)
    row = far.enter(text)
    assert far.draft(row) == list(range(8))
    assert far.drafter._texts.index.longest < 64  # type: ignore[attr-defined]
    never = ngram(max_model_len=64, prompt_lookup_min=1 << 62, prompt_lookup_max=1 << 62)
    assert never.draft(never.enter(text)) == []


def test_a_factor_without_end_leaves_a_draft_as_long_as_its_limits() -> None:
    texts = suffix(max_spec_factor=1e308, min_token_prob=0.0)
    assert texts.draft(texts.enter(list(range(10)) * 3)) == list(range(8))
