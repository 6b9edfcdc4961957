from tests.coordinator.decider_world import X
def test_x() -> None:
    assert X == 1
