from penstock.api.request import FinishReason


def test_a_finish_reason_reads_as_its_value() -> None:
    assert f"{FinishReason.STOP} {FinishReason.LENGTH!s}" == "stop length"
