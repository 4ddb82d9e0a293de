"""Rules of the built-in scorers: what counts as the answer, what counts as equal."""

import pytest

from hybridflow.rewards.answers import exact_match, marked_number
from hybridflow.rewards.mathematics import symbolic_match


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("122", "122", 1),
        (" 122\n", "122", 1),
        ("0122", "122", 1),
        ("122.0", 122, 1),
        ("1220", "122", 0),
        ("", "122", 0),
    ],
)
def test_exact_match_takes_the_whole_response(response, truth, score):
    assert exact_match(response, truth) == score


def test_exact_match_compares_words_too_and_infinity_is_no_number():
    assert exact_match("Paris", "Paris") == 1
    assert exact_match("paris", "Paris") == 0
    assert exact_match("NaN", "nan") == 0
    assert exact_match("inf", "Infinity") == 0


@pytest.mark.parametrize("truth", [42, 42.0, "42", ["42"], "42.00", "so it is\n#### 42", ["41", 42]])
@pytest.mark.parametrize("scorer", [lambda r, t: exact_match(r[5:], t), marked_number])
def test_numeric_truths_of_any_type_match(scorer, truth):
    if scorer is not marked_number and "####" in str(truth):
        pytest.skip("only GSM8K's rule reads markers")
    assert scorer("#### 42", truth) == 1


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("so #### 42" + " and then" * 60, "42", 1),
        ("#### 1,000", "1000", 1),
        ("#### -5", "-5", 1),
        ("#### 5", "-5", 0),
        ("#### $12", "12", 1),
        ("#### -$12", "-12", 1),
        ("#### 3.0", "3", 1),
        ("#### 50%", "50", 1),
        ("#### 42.", "42", 1),
        ("#### 42 dollars", "42", 1),
        ("####42", "42", 1),
        ("#### The answer is 42", "42", 1),
        ("#### 41\nno, #### 42", "42", 1),
        ("#### 42\nno, #### 41", "42", 0),
        ("#### .5", "0.5", 1),
        ("42", "42", 0),
        ("", "42", 0),
        ("####", "42", 0),
        ("#### forty-two", "42", 0),
    ],
)
def test_the_number_after_the_last_marker_counts(response, truth, score):
    assert marked_number(response, truth) == score


@pytest.mark.parametrize("truth", ["", None, [], [""], "  "])
@pytest.mark.parametrize("scorer", [exact_match, marked_number, symbolic_match])
@pytest.mark.parametrize("response", ["", "42", "#### 42", "None"])
def test_an_empty_ground_truth_fails_and_never_pays(scorer, truth, response):
    with pytest.raises(ValueError, match=r"empty.*bad data"):
        scorer(response, truth)


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        (r"thus \boxed{\frac{1}{2}}", "0.5", 1),
        (r"thus \boxed{1/2}", r"\frac{1}{2}", 1),
        (r"\boxed{3} no, \boxed{4}", "4", 1),
        (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
        (r"\boxed{5}", "4", 0),
        ("I do not know", "4", 0),
        (r"\boxed{4}", 4, 1),
    ],
)
def test_mathematical_answers_are_compared_symbolically(response, truth, score):
    assert symbolic_match(response, truth) == score
