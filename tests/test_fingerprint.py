import json

import pytest
import torch

from samestep import identity as module
from samestep.identity import changes, compare, fingerprint

CPU = torch.device("cpu")


def test_it_holds_what_json_can_hold_and_is_the_same_twice():
    entries = fingerprint(CPU)
    assert entries == fingerprint(CPU) == json.loads(json.dumps(entries))
    assert entries["threads"] == torch.get_num_threads()
    assert entries["torch"] == torch.__version__
    assert {"device", "CPU", "CPU kernels", "Python", "NumPy", "samestep"} <= entries.keys()
    assert not any("GPU" in name for name in entries)


def test_what_changes_the_kernels_changes_it(monkeypatch):
    before, threads = fingerprint(CPU), torch.get_num_threads()
    precision = torch.get_float32_matmul_precision()
    try:
        torch.set_num_threads(threads + 1)
        torch.set_float32_matmul_precision("medium")
        monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
        found = changes(before, fingerprint(CPU))
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(precision)
    assert found[0] == f"threads = {threads}, now {threads + 1}"
    assert (
        found[1] == "float32 on CPU = matmul none, conv none, rnn none, now matmul bf16, conv none, rnn none"
    )
    assert found[2:] == ["ONEDNN_MAX_CPU_ISA = None, now AVX2"]


def test_a_cpu_is_told_from_others_of_its_name(monkeypatch):
    class Info:
        def __init__(self, _):
            pass

        def read_text(self):
            return "processor : 0\nmodel name\t: A CPU: fast\ncpu family : 25\nmodel : 17\n\nprocessor : 1"

    monkeypatch.setattr(module, "Path", Info)
    assert module._cpu.__wrapped__() == "A CPU: fast (cpu family 25, model 17)"


def test_entries_of_others_are_told_without_what_they_hide():
    assert changes({"torch": "2\x1b[2J\n"}, {}) == [r"torch = 2\x1b[2J, now None"]


# ---- compared between workers ------------------------------------------------------------------------

HERE = {"device": "cpu", "CPU": "a", "CPU kernels": "AVX512", "threads": 1, "torch": "2.13", "NumPy": "2.4"}


@pytest.mark.parametrize("num_workers", [1, 2, 3])
def test_like_workers_do_not_differ(num_workers):
    assert compare([HERE] * num_workers) == compare([fingerprint(CPU)] * num_workers) == ([], [])


def test_other_software_is_an_error_and_other_hardware_a_warning():
    there = {**HERE, "CPU": "b", "torch": "2.12", "threads": 2, "MKL_CBWR": "AVX2"}
    errors, warnings = compare([HERE, there, HERE])
    assert errors == [
        "worker 1 has threads = 2, the others have 1",
        "worker 1 has torch = 2.12, the others have 2.13",
        "worker 1 has MKL_CBWR = AVX2, the others have None",
    ]
    assert warnings == ["worker 1 has CPU = b, the others have a"]


def test_another_gpu_is_a_warning_and_another_driver_library_an_error():
    here = {**HERE, "device": "cuda", "GPU": "A", "cuDNN": 1}
    errors, warnings = compare([here, {**here, "GPU": "B"}, {**here, "cuDNN": 2}])
    assert errors == ["worker 2 has cuDNN = 2, the others have 1"]
    assert warnings == ["worker 1 has GPU = B, the others have A"]


@pytest.mark.parametrize(
    ("cpus", "kernels", "is_error"),
    [("aab", "112", False), ("aaa", "112", True), ("aba", "122", True), ("abc", "112", False)],
)
def test_a_cpu_may_choose_its_kernels_but_equal_ones_choose_alike(cpus, kernels, is_error):
    workers = [{**HERE, "CPU": cpu, "CPU kernels": kernel} for cpu, kernel in zip(cpus, kernels, strict=True)]
    errors, warnings = compare(workers)
    assert len(errors) == is_error
    assert sum("CPU kernels" in line for line in errors if is_error) == is_error
    assert sum("CPU kernels" in line for line in warnings) == (not is_error)


def test_a_gpu_beside_a_cpu_is_one_error():
    errors, warnings = compare([HERE, {**HERE, "device": "cuda", "GPU": "A", "cuDNN": 1}])
    assert errors == ["worker 0 has device = cpu, worker 1 has device = cuda"]
    assert warnings == []


def test_entries_of_other_workers_are_one_line():
    errors, _ = compare([{"a\nb": "c\x1b\n"}, {"a\nb": "d"}])
    assert errors == [r"worker 0 has a b = c\x1b, worker 1 has a b = d"]


# ---- precisions ----------------------------------------------------------------------------------------


def precisions_where_the_older_interface_refuses():
    found = []

    def take():
        with pytest.raises(RuntimeError):
            torch.get_float32_matmul_precision()
        found.append(fingerprint(CPU)["float32 on CPU"])

    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    take()
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    take()
    torch.backends.fp32_precision = "tf32"
    take()
    return found


@pytest.mark.long
def test_it_can_be_taken_where_the_older_interface_refuses(elsewhere):
    expected = ["matmul none, conv none, rnn none", "matmul bf16, conv none, rnn none"]
    expected = [*expected, "matmul bf16, conv tf32, rnn tf32"]
    assert elsewhere(precisions_where_the_older_interface_refuses) == expected
