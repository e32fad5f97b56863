"""What a search of the stack finds, and that it leaves nothing behind."""

import gc
import weakref

from samestep.watching.program.reach import in_reach


class Kept:
    pass


class Example:
    pass


def found():
    return [value for _, value in in_reach(lambda value: type(value) is Kept)]


def test_variables_of_callers_are_found():
    kept = Kept()
    assert found() == [kept]


def test_each_name_is_found():
    kept = Kept()
    others = {2: kept, (1, 2): [kept], "last": kept}
    names = [name for name, value in in_reach(lambda value: type(value) is Kept) if value is kept]
    assert names == ["kept", "others[2]", "last of others", "others[...][0]"]
    del others


def test_data_comes_last():
    sentences = [[[[1, 2]] for _ in range(30)] for _ in range(30)]
    train, valid, test = ([Example() for _ in range(200)] for _ in range(3))
    nets = {"first": Kept()}
    assert found() == [nets["first"]]
    del sentences, train, valid, test


def test_what_a_variable_has_held_is_let_go():
    kept = Kept()
    reference = weakref.ref(kept)
    assert len(found()) == 1
    kept = None
    gc.collect()
    assert reference() is None


def test_a_program_s_own_dict_of_its_variables_stays_as_it_is():
    kept = Kept()
    variables = locals()
    assert set(found()) == {kept}
    assert variables["kept"] is kept


def test_variables_may_be_read_again():
    number = 3
    found()
    assert locals()["number"] == number


def test_the_namespace_of_a_class_body_stays():
    class Body:
        kept = Kept()
        others = found()

    assert Body.others == [Body.kept]


class Settings:
    kept = Kept()

    def method(self):
        return self.kept


def test_values_of_classes_come_last():
    kind, others = Settings, {1: Kept()}
    names = [name for name, value in in_reach(lambda value: type(value) is Kept)]
    assert names == ["others[1]", "kept of kind"]
    del kind, others
