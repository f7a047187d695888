"""The test suites of optax and Flax, with swjax's parts in place of theirs.

`make peers` downloads the suites and runs them, in about half an hour. Every test that passes with the
library's own parts must pass with swjax's, except the tests in `KNOWN`.
"""

import re

import pytest
from peers import suites

pytestmark = pytest.mark.peers

NEEDS_PARAMETERS = "StableAdamW reads the parameters in `update`; optax.adam does not"
WRITTEN_FOR_ADAM = "compares the state, or values of some steps, with those of optax's Adam"
STATE_OF_A_GUARD = "expects the optimizer's own state, which the guard's contains"

GUARDS = {
    r"combin.*test_extra_args": "an integer gradient is refused in one line",
    r"_conditionality_test.*test_apply_if_finite": "the guard replaces a non-finite update first",
    r"_masking_test.*test_masked_state_structure": STATE_OF_A_GUARD,
    r"_state_utils_test.*(test_adam|test_inject_hparams|test_map_non_params_to_none)": STATE_OF_A_GUARD,
}

# {part: {pattern of "file::test": reason}}
KNOWN: dict[str, dict[str, str]] = {
    "stable_adamw": {
        r"alias.*test_explicit_dtype": "moments of complex parameters stay complex, whatever mu_dtype is",
        r"alias.*test_optimization": "the clipped updates need more steps than the test allows",
        r"comb.*test_extra_args": "an integer parameter is refused in one line",
        r"comb.*test_labels_mismatch": NEEDS_PARAMETERS,
        r"schedule_free.*test_schedule_free_adamw": WRITTEN_FOR_ADAM,
        r"state_utils.*(test_adam|test_map_non_params_to_none)": WRITTEN_FOR_ADAM,
        r"state_utils.*test_inject_hparams": WRITTEN_FOR_ADAM,
        r"state_utils.*test_tree_set": NEEDS_PARAMETERS,
    },
    "per_tensor_guard": GUARDS,
    "dynamic_loss_scale": GUARDS,
    "linen": {
        r"linen_module.*test_module_trace": "compares the printed attributes of Dense; ours has three more"
    },
    "nnx": {},
}


@pytest.mark.parametrize("suite", suites.SUITES, ids=str)
def test_a_suite_passes_with_our_parts(suite):
    if suite.path is None or not suite.path.exists():
        pytest.skip(f"the tests of {suite.library} are not here: run `make peers`")
    ours = suites.outcomes(suite)
    assert ours, f"{suite.file} has no test that matches {suite.select!r}"
    failed = {name: error for name, error in ours.items() if error not in ("passed", "skipped")}
    if failed:
        control = suites.outcomes(suite, substitute=False)
        failed = {name: error for name, error in failed.items() if control[name] == "passed"}
    known = KNOWN[suite.substitution]
    matched = {pattern: _matching(pattern, suite, failed) for pattern in known}
    unknown = {name: failed[name] for name in failed.keys() - set().union(*matched.values())}
    assert not unknown
    mended = [p for p in known if not matched[p] and _matching(p, suite, ours)]
    assert not mended, "these tests pass: delete their rows from KNOWN"


def _matching(pattern: str, suite: suites.Suite, names: dict[str, str]) -> set[str]:
    return {name for name in names if re.search(pattern, f"{suite.file}::{name}")}


def test_the_guard_of_this_test_can_fail():
    """Every pattern of `KNOWN` names a file and a test."""
    for known in KNOWN.values():
        assert all("test_" in pattern and reason for pattern, reason in known.items())
