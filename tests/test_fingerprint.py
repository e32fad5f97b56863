import json

import torch

from samestep import identity as module
from samestep.identity import changes, fingerprint

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
    assert found[1].startswith("float32 on CPU = highest (")
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
    assert changes({"torch": "2\x1b[2J\n"}, {}) == [r"torch = '2\x1b[2J', now None"]
