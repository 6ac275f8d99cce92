"""Radii that cannot be certificates for their sigma, n and alpha are refused; published rounding is
understood.
"""

from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smoothadv.analysis.shared.hyper_parameters import Parameters
from smoothadv.analysis.shared.plausibility import check_certificates, coarse_digits
from smoothadv.base.errors import UserError
from smoothadv.statistics.bounds import certified_radius, maximum_radius
from support import refusals

LOG = Path("results/noise_0.50/test/sigma_0.50")
CAPS = {0.12: 0.4574, 0.25: 0.9529, 0.5: 1.9057, 1.0: 3.8115}
"""The largest radius for n = 100,000 and alpha = 0.001, to the four decimals that released logs
have.
"""


def parameters_of(sigma: float | None = 0.5, source: str = "assumed", **values) -> Parameters:
    """Published n and alpha, from where ``source`` says, and sigma from the path; ``values``
    replace any.
    """
    values = {"sigma": sigma, "N": 100_000, "alpha": 0.001, **values}
    sources = {"sigma": "path sigma_0.50", "N": source, "alpha": source}
    known = {name: value for name, value in values.items() if value is not None}
    return Parameters(known, {name: sources[name] for name in known})


TOLD = parameters_of(0.5, "manifest", N=1000)


def with_method(**settings_) -> Parameters:
    """Those of a log of ours, by this method."""
    return Parameters(
        TOLD.values, TOLD.sources, {"settings": {**TOLD.values, **settings_}, "runs": []}
    )


def table_of(*radii: float, **columns) -> pd.DataFrame:
    """Correct examples 0, 20, 40, ... of these radii."""
    count = len(radii)
    table = {
        "idx": range(0, 20 * count, 20),
        "label": range(count),
        "predict": range(count),
        "radius": radii,
    }
    return pd.DataFrame({**table, **columns, "correct": 1}).astype({"radius": "float64"})


def counted(
    *successes: int, trials: int = 1000, sigma: float = 0.5, alpha: float = 0.001
) -> pd.DataFrame:
    """A log of ours: the radii that the counts certify."""
    radii = [certified_radius(count, trials, sigma, alpha) for count in successes]
    table = table_of(*(radius or 0.0 for radius in radii), successes=list(successes), trials=trials)
    table.loc[[radius is None for radius in radii], ["predict", "correct"]] = [-1, 0]
    return table


# Of two different n.
MIXED = pd.concat([counted(1000, 900), counted(90, trials=100).assign(idx=60)], ignore_index=True)


def refusal(table: pd.DataFrame, parameters: Parameters) -> str:
    return refusals.refusal(check_certificates, LOG, table, parameters, names=LOG)


def notes_of(table: pd.DataFrame, parameters: Parameters) -> list[str]:
    return check_certificates(LOG, table, parameters)[1]


def accepted(table: pd.DataFrame, parameters: Parameters) -> bool:
    try:
        check_certificates(LOG, table, parameters)
    except UserError:
        return False
    return True


@pytest.mark.parametrize("sigma, cap", CAPS.items())
def test_the_published_n_and_alpha_cap_the_radius(sigma, cap):
    parameters = parameters_of(sigma)
    assert accepted(table_of(0.1, cap), parameters)
    message = refusal(table_of(0.1, cap + 0.0002, 9.0), parameters)
    assert (
        "first at idx 20" in message
        and f"sigma {sigma:g}, n = 100,000 and alpha = 0.001" in message
    )


@pytest.mark.parametrize("sigma", [*CAPS, 3.0, 5.0, 8.0])
@pytest.mark.parametrize("digits", [".3g", ".4f", ".17g"])
def test_cap_may_be_rounded_up_in_the_last_printed_digit_and_no_more(sigma, digits):
    """At sigma 5 the cap 19.0575 is printed as 19.1."""
    cap = maximum_radius(100_000, sigma, 0.001)
    more = {
        ".3g": 0.1 if cap > 10 else 0.01 if cap > 1 else 0.001,
        ".4f": 0.0002,
        ".17g": cap * 1e-7,
    }[digits]
    printed = float(f"{cap:{digits}}")
    assert accepted(table_of(printed), parameters_of(sigma))
    assert not accepted(table_of(float(f"{printed + more:{digits}}")), parameters_of(sigma))


@given(
    st.floats(0.05, 2.5),
    st.integers(10, 1_000_000),
    st.sampled_from([0.01, 0.001, 1e-5]),
    st.sampled_from([".3g", ".4f", ".17g"]),
)
def test_no_true_certificate_is_refused_however_it_was_printed(sigma, n, alpha, digits):
    cap = maximum_radius(n, sigma, alpha)
    parameters = parameters_of(sigma, "manifest", N=n, alpha=alpha)
    printed = [float(f"{share * cap:{digits}}") for share in (1, 0.9999, 0.5)]
    assert accepted(table_of(*printed), parameters)
    assert not accepted(table_of(0.0, cap + 0.006), parameters), "a radius above any rounding"


def test_zero_radii_are_always_possible():
    assert accepted(table_of(0.0, 0.0), parameters_of(N=1))
    assert not accepted(table_of(0.0, 0.02), parameters_of(N=1, source="stated"))


def test_a_log_of_unknown_sigma_is_not_checked_and_says_so():
    assert "sigma is unknown" in " ".join(notes_of(table_of(50.0), parameters_of(None)))
    assert notes_of(table_of(0.5), parameters_of(0.5)) == []


def test_message_says_where_sigma_n_and_alpha_are_from():
    message = refusal(table_of(2.0), parameters_of(0.5, "stated"))
    assert (
        "sigma path sigma_0.50" in message and "N stated" in message and "alpha stated" in message
    )


def test_our_counts_certify_our_radii():
    assert notes_of(counted(1000, 999, 600, 400), TOLD) == []


@pytest.mark.parametrize("sigma", [0.25, 0.4999, 0.5001, 1.0])
def test_row_of_another_sigma_is_given_away_by_its_counts(sigma):
    mixed = pd.concat(
        [counted(1000, 900), counted(700, 600, sigma=sigma).assign(idx=[60, 80])], ignore_index=True
    )
    message = refusal(mixed, TOLD)
    assert "counts do not certify" in message and "idx 60" in message and "sigma 0.5" in message
    assert accepted(mixed.iloc[:2], TOLD)


@pytest.mark.parametrize("alpha", [0.01, 0.0011, 1e-5])
def test_another_alpha_is_given_away_by_the_counts(alpha):
    assert "alpha 0.001" in refusal(counted(900, 700, alpha=alpha), TOLD)
    assert accepted(
        counted(900, 700, alpha=alpha), parameters_of(0.5, "manifest", N=1000, alpha=alpha)
    )


def test_radius_above_what_its_counts_certify_is_refused():
    table = counted(900, 700)
    for factor, fine in [(1, True), (1 + 1e-9, True), (1 + 1e-5, False), (0.99, False)]:
        changed = table.assign(radius=table.radius * [1, factor])
        assert accepted(changed, TOLD) is fine, factor


@pytest.mark.parametrize("successes", [0, 100, 500, 540])
def test_a_prediction_whose_counts_certify_nothing_is_refused(successes):
    """Such counts abstain: a class with radius 0 in their place would raise the clean accuracy."""
    abstaining = counted(900, successes)
    assert abstaining.predict.tolist() == [0, -1] and accepted(abstaining, TOLD)
    assert "idx 20" in refusal(abstaining.assign(predict=[0, 1], correct=1), TOLD)


def test_mixed_trials_are_refused():
    for parameters in (TOLD, parameters_of(None), parameters_of(0.5)):
        message = refusal(MIXED, parameters)
        assert "different n: 100 trials at idx 60 where others have 1000" in message
        assert accepted(MIXED.iloc[:2], parameters)


@pytest.mark.parametrize("source", ["manifest", "stated"])
def test_trials_must_be_the_n_that_was_told(source):
    message = refusal(counted(90, trials=100), parameters_of(0.5, source, N=1000))
    assert "100 trials" in message and "n = 1000" in message and source in message
    assert accepted(counted(90, trials=100), parameters_of(0.5, source, N=100))


def test_trials_win_over_an_n_that_was_only_assumed():
    """A log of ours that lost its manifest still says its n."""
    parameters, _ = check_certificates(LOG, counted(90, 80, trials=100), parameters_of(0.5))
    assert parameters.get("N") == 100 and parameters.sources["N"] != "assumed"


@pytest.mark.parametrize("sigma", [0.12, 0.25, 1.0, 1 / 3, 0.123456789, 2**0.5])
def test_counts_tell_the_sigma_of_a_log_that_nothing_else_tells(sigma):
    parameters, notes = check_certificates(
        LOG, counted(400, 999, 700, sigma=sigma), parameters_of(None)
    )
    assert (
        parameters.get("sigma") == pytest.approx(sigma, rel=1e-5)
        and "counts" in parameters.sources["sigma"]
    )
    assert notes == []
    mixed = pd.concat(
        [counted(999, sigma=sigma), counted(700, sigma=0.9 * sigma).assign(idx=60)],
        ignore_index=True,
    )
    assert "idx 60" in refusal(mixed, parameters_of(None))


@pytest.mark.parametrize("successes", [(400, 900), (900, 400), (900, 990)])
def test_counts_that_certify_while_all_radii_are_zero_tell_no_sigma(successes):
    table = counted(*successes).assign(radius=0.0)
    for predict in (-1, 0):  # whatever the verdict on such a log, nothing may break
        if accepted(table.assign(predict=predict), parameters_of(None)):
            parameters, _ = check_certificates(
                LOG, table.assign(predict=predict), parameters_of(None)
            )
            assert parameters.get("sigma") is None


def test_no_trials_are_refused():
    table = counted(90, trials=100).assign(successes=0, trials=0)
    for parameters in (
        parameters_of(None),
        parameters_of(0.5),
        parameters_of(0.5, "manifest", N=100),
    ):
        refusal(table, parameters)


def test_a_method_that_adapts_n_may_have_differing_trials():
    assert accepted(MIXED, with_method(method="adaptive"))
    assert not accepted(MIXED, with_method(method="exact"))
    assert not accepted(MIXED, with_method()), "exact is what a manifest means that names no method"


def test_a_method_that_adapts_n_still_has_a_cap():
    parameters = with_method(method="adaptive")
    cap = maximum_radius(1000, 0.5, 0.001)
    table = table_of(cap, 0.1, successes=[1000, 90], trials=[1000, 100])
    assert accepted(table, parameters)
    assert "cannot be certified" in refusal(table.assign(radius=[cap * 1.001, 0.1]), parameters)


def pile(sigma: float, times: int, alpha: float = 0.01) -> pd.DataFrame:
    """Released radii of which the largest is there several times."""
    cap = float(f"{maximum_radius(100_000, sigma, alpha):.3}")
    return table_of(0.1 * sigma, *[cap] * times)


@pytest.mark.parametrize("sigma", CAPS)
def test_radii_that_pile_up_at_the_cap_of_a_larger_alpha_tell_that_alpha(sigma):
    """3.91 sigma, at n = 100,000, is the cap of alpha = 0.01."""
    assert maximum_radius(100_000, 1.0, 0.01) == pytest.approx(3.9105, abs=1e-3)
    parameters, notes = check_certificates(LOG, pile(sigma, 3), parameters_of(sigma))
    assert (parameters.get("alpha"), parameters.get("N")) == (0.01, 100_000)
    assert "inferred" in parameters.sources["alpha"]
    assert any("alpha = 0.01" in note and "impossible for alpha = 0.001" in note for note in notes)


@pytest.mark.parametrize("stated", ["N", "alpha", "both"])
@pytest.mark.parametrize("source", ["manifest", "stated"])
def test_an_alpha_that_was_told_is_not_second_guessed(stated, source):
    parameters = parameters_of(0.5)
    for name in ("N", "alpha") if stated == "both" else (stated,):
        parameters = parameters.replaced(name, parameters.get(name), source)
    assert "cannot be certified" in refusal(pile(0.5, 3), parameters)


def test_alpha_is_not_inferred_where_the_radii_pile_up_elsewhere():
    for sigma, alpha in [(0.5, 0.02), (0.5, 0.05), (1.0, 0.1)]:
        assert "cannot be certified" in refusal(pile(sigma, 3, alpha), parameters_of(sigma))
    parameters, notes = check_certificates(LOG, pile(0.5, 3, 0.001), parameters_of(0.5))
    assert (parameters.get("alpha"), parameters.sources["alpha"], notes) == (0.001, "assumed", [])


def test_one_radius_at_that_cap_or_above_the_pile_is_a_fault_like_any_other():
    assert "cannot be certified" in refusal(pile(0.5, 1), parameters_of(0.5))
    above = pd.concat([pile(0.5, 3), table_of(1.99).assign(idx=99)], ignore_index=True)
    assert "idx" in refusal(above, parameters_of(0.5))


@pytest.mark.parametrize(
    "radii, unit",
    [
        ([1.91, 0.0512, 9.76e-05, 0.0], "0.005"),
        ([0.953, 0.0512], "0.0005"),
        ([1.9057, 0.0513], "5e-05"),
        ([0.4574, 0.05], "5e-05"),
        ([12.3, 1.0], "0.05"),
    ],
)
def test_note_on_coarse_digits_says_by_how_much_a_radius_may_be_too_large(radii, unit):
    (note,) = coarse_digits(table_of(*radii))
    assert "rounded" in note and note.endswith(f"by at most {unit}")


def test_full_precision_and_no_radius_at_all_are_not_called_coarse():
    assert coarse_digits(counted(1000, 900, 700)) == []
    assert coarse_digits(table_of(0.5, 0.12345678901234567)) == []
    assert coarse_digits(table_of(0.0, 0.0)) == []


def test_notes_of_the_reader_are_kept():
    table = table_of(0.5)
    table.attrs["notes"] = ["its last line was cut off and is left out"]
    assert notes_of(table, parameters_of(0.5)) == table.attrs["notes"]


@pytest.mark.parametrize(
    "predict, words", [(7, "predicts class 7 for every example"), (-1, "abstains on every")]
)
def test_classifier_that_ignores_its_input_is_noted(predict, words):
    """In a log of at least twenty examples of several classes."""
    table = table_of(*[0.0] * 30).assign(predict=predict, label=[0, 7] * 15)
    (note,) = notes_of(table, parameters_of(0.5))
    assert words in note
    others = [table.iloc[:10], table.assign(label=7), table.assign(predict=[predict] * 29 + [3])]
    assert [notes_of(other, parameters_of(0.5)) for other in others] == [[], [], []]
