from stepwell.dashboard.follower import CallBudget


def test_the_reserve_pays_first_and_then_only_the_share_is_spent() -> None:
    budget, now = CallBudget(share=0.01, reserve=0.5), 0.0
    budget.spend(0.4, 4, now)
    assert budget.pause(now) == 0.0
    budget.spend(0.3, 3, now)
    assert round(budget.pause(now), 6) == 20.0
    assert round(budget.pause(now + 5), 6) == 15.0
    assert budget.pause(now + 20.1) == 0.0


def test_over_a_long_time_no_more_than_the_share_is_spent() -> None:
    budget, now, spent = CallBudget(share=0.01, reserve=0.5), 0.0, 0.0
    while now < 1_000:
        budget.spend(0.02, 1, now)
        spent += 0.02
        now += max(0.02, budget.pause(now))
    assert 10.0 <= spent <= 10.6


def test_a_call_counts_as_much_as_the_quickest_of_late() -> None:
    budget = CallBudget(share=0.01, reserve=0.5)
    budget.spend(0.1, 100, 0.0)
    budget.spend(30.0, 200, 0.0)
    budget.spend(30.0, 300, 0.0)
    assert round(budget.pause(0.0), 6) == 10.0


def test_the_first_call_costs_the_reserve_at_most_because_there_is_no_other_to_compare_it_with() -> None:
    budget = CallBudget(share=0.01, reserve=0.5)
    budget.spend(30.0, 100, 0.0)
    assert budget.pause(0.0) == 0.0
    budget.spend(0.1, 100, 0.0)
    assert round(budget.pause(0.0), 6) == 10.0
    budget.spend(30.0, 100, 0.0)
    assert round(budget.pause(0.0), 6) == 20.0
