"""The unpickler builds arrays, lists, dicts, strings and numbers; a malicious file does nothing at all."""

import os
import pickle
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bullettrain.data import DataError, load
from bullettrain.data.pickles import read_pickle

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(min_size=1),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("pickles") / "batch"


@settings(deadline=None)
@given(content=st.dictionaries(st.text(), plain, max_size=4), protocol=st.sampled_from([2, 3, 4]))
def test_plain_values_come_back(file, content, protocol):
    file.write_bytes(pickle.dumps(content, protocol=protocol))
    assert read_pickle(file, "cifar10") == content


@pytest.mark.parametrize("dtype", ["u1", "i8", ">i2", "f4", "f8", "?"])
@pytest.mark.parametrize("protocol", [2, 4])
def test_arrays_come_back(file, dtype, protocol):
    array = np.arange(12).reshape(3, 4).astype(dtype)
    file.write_bytes(pickle.dumps({"data": array}, protocol=protocol))
    read = np.asarray(read_pickle(file, "cifar10")["data"])
    assert read.dtype == array.dtype.newbyteorder("=")
    assert np.array_equal(read, array)


class Calls:
    """Pickles as the call of a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def string(text: str) -> bytes:
    return b"X" + struct.pack("<I", len(text)) + text.encode()


def protocols(content):
    return [pickle.dumps(content, protocol=p) for p in range(pickle.HIGHEST_PROTOCOL + 1)]


def test_malicious_files_have_no_effect_and_are_named(tmp_path):
    mark = tmp_path / "mark"
    touch, make = f"touch {mark}", f"open({str(mark)!r}, 'w').close()"
    system = f"{os.system.__module__}.system"
    attacks = [(system, data) for data in protocols(Calls(os.system, touch))]
    attacks += [(system, data) for data in protocols({"labels": [0, 1, [Calls(os.system, touch)]]})]
    attacks += [("eval", data) for data in protocols({"data": Calls(eval, make)})]
    attacks += [("exec", data) for data in protocols(Calls(exec, make))]
    attacks += [("getattr", data) for data in protocols(Calls(getattr, "text", "upper"))]
    objects = np.array([{}, Calls(os.system, touch)], dtype=object)
    attacks += [("dtype 'O8'", pickle.dumps({"data": objects}, protocol=p)) for p in (2, 4)]
    attacks += [
        ("os.system", b"(" + string(touch) + b"ios\nsystem\n."),  # INST
        ("os.system", b"(cos\nsystem\n" + string(touch) + b"o."),  # OBJ
        ("os.system", b"\x80\x04" + string("os") + string("system") + b"\x93" + string(touch) + b"\x85R."),
        ("numpy.load", b"cnumpy\nload\n(" + string(str(mark)) + b"tR."),
        ("numpy.core.multiarray.scalar", b"cnumpy.core.multiarray\nscalar\n(tR."),
        ("a persistent object", b"Psomewhere\n."),
    ]
    file = tmp_path / "data_batch_1"
    for name, data in attacks:
        file.write_bytes(data)
        with pytest.raises(DataError) as caught:
            read_pickle(file, "cifar10")
        assert str(file) in str(caught.value), data
        assert name in str(caught.value), data
        assert "\n" not in str(caught.value)
        assert not mark.exists(), data


RECONSTRUCT = b"cnumpy.core.multiarray\n_reconstruct\n"
UNSIGNED = b"cnumpy\ndtype\n(" + string("u1") + b"I0\nI1\ntR"


@pytest.mark.parametrize(
    ("name", "data"),
    [
        ("an array of another type", RECONSTRUCT + b"(cnumpy\ndtype\n(I0\nt" + string("b") + b"tR."),
        ("an array of another type", RECONSTRUCT + b"(" + RECONSTRUCT + b"(I9\ntI0\ntR."),
        ("a call of numpy.ndarray", b"cnumpy\nndarray\n((I4\ntI0\ntR."),
        ("dtype 'O'", b"cnumpy\ndtype\n(" + string("O") + b"tR."),
        ("dtype 'i4,O'", b"cnumpy\ndtype\n(" + string("i4,O") + b"tR."),
        ("a structured dtype", UNSIGNED + b"(I3\n" + string("|") + b"N(" + string("a") + b"tNtb."),
        ("_codecs.encode to 'zip'", b"c_codecs\nencode\n(" + string("x") + string("zip") + b"tR."),
        ("a change to _codecs.encode", b"c_codecs\nencode\n(N}" + string("f") + b"Nstb."),
        ("a change to numpy.ndarray", b"cnumpy\nndarray\n}" + string("__call__") + b"Nsb."),
        ("an array of objects", b"ARRAY(I1\n(I1\nt" + UNSIGNED + b"I0\n(lN" + b"atb."),
        ("an array without a dtype", b"ARRAY(I1\n(I1\ntNI0\n" + b"C\x01atb."),
        ("not a pickle (an array of shape", b"ARRAY(I1\n(I99999999999\nt" + UNSIGNED + b"I0\nC\x01atb."),
        ("not a pickle (an array of shape", b"ARRAY(I1\n(I-1\nI-1\nt" + UNSIGNED + b"I0\nC\x01atb."),
    ],
)
def test_permitted_names_cannot_be_misused(tmp_path, name, data):
    array = RECONSTRUCT + b"(cnumpy\nndarray\n(I0\nt" + string("b") + b"tR"
    file = tmp_path / "batch"
    file.write_bytes(data.replace(b"ARRAY", array))
    with pytest.raises(DataError) as caught:
        read_pickle(file, "cifar10")
    assert name in str(caught.value)
    assert str(file) in str(caught.value)


def refusal(file: Path) -> str:
    try:
        return f"{file}: by chance {read_pickle(file, 'cifar10')}"
    except DataError as error:
        return str(error)


@settings(deadline=None)
@given(data=st.binary(max_size=60))
def test_random_bytes_are_refused_in_one_sentence(file, data):
    file.write_bytes(data)
    message = refusal(file)
    assert message.startswith(str(file))
    assert "\n" not in message


def test_a_malicious_batch_stops_load(tmp_path):
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    mark = tmp_path / "mark"
    (folder / "batches.meta").write_bytes(pickle.dumps({"label_names": Calls(os.system, f"touch {mark}")}, 2))
    with pytest.raises(DataError, match=r"batches.meta is .*asks for \w+\.system"):
        load("cifar10", split="train", root=tmp_path)
    assert not mark.exists()
