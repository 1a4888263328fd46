"""What is not decided, missing, left over or wrong is one error that lists it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import pax_export as pax
from tests.closeness import assert_close
from tests.refusals import refused
from tests.weights.adoption.foreign import CASES, Free, assert_refused, normal


def dense(name, inputs, outputs):
    return {f"{name}.weight": normal(outputs, inputs), f"{name}.bias": normal(outputs)}


def test_equal_layers_without_names_are_ambiguous():
    net = Free(left=pax.Linear(3, 4), right=pax.Linear(3, 4))
    error = assert_refused(net, {**dense("x", 3, 4), **dense("y", 3, 4)})
    assert isinstance(error, pax.errors.AmbiguousWeightsError)
    assert error.candidates["x.weight"] == ("left", "right")

    assert error.write.startswith('rename={"x": "left", ...}, with * for numbers; or reference=')


def test_an_array_without_its_bias_is_named_beside_one_of_two_layers():
    net = Free(first_dense=pax.Linear(8, 4), second_dense=pax.Linear(8, 4))
    error = assert_refused(net, {"dense.weight": normal(4, 8)})
    assert error.missing == ("first_dense.bias", "second_dense.weight", "second_dense.bias")
    assert error.left == ()


def test_square_weights_of_an_unknown_framework_are_ambiguous():
    error = assert_refused(pax.Linear(4, 4), dense("fc", 4, 4))
    assert "fc.weight: transposed (torch) or as it is (pax)" in str(error)
    assert 'origin="mlx" or origin="pax" or origin="torch"' in error.write
    file = dense("fc", 4, 4)
    net, _ = pax.weights.adopt(pax.Linear(4, 4), file, origin="torch")
    assert np.array_equal(net.weight, file["fc.weight"].T)
    net, _ = pax.weights.adopt(pax.Linear(4, 4), file, axes={"weight": (0, 1)})
    assert np.array_equal(net.weight, file["fc.weight"])


def test_a_non_square_layer_decides_the_layout_of_others():
    file = {**dense("0", 3, 4), **dense("2", 4, 4)}
    net, report = pax.weights.adopt(pax.Sequential(pax.Linear(3, 4), pax.Linear(4, 4)), file)
    assert report.origin == "torch"
    assert np.array_equal(net[1].weight, file["2.weight"].T)


def test_numbers_that_count_no_layers_decide_nothing():
    net = pax.Sequential(pax.Linear(3, 3), pax.Linear(3, 3))
    arrays = [normal(3, 3), normal(3), normal(3, 3), normal(3)]
    error = assert_refused(net, {f"arr_{place}": array for place, array in enumerate(arrays)})
    assert isinstance(error, pax.errors.AmbiguousWeightsError)


def test_one_of_two_equal_nets_is_chosen_by_ignore():
    one, other = dense("fc", 3, 4), dense("fc", 3, 4)
    file = {**{f"student.{n}": a for n, a in one.items()},
            **{f"teacher.{n}": a for n, a in other.items()}}  # fmt: skip
    assert_refused(pax.Linear(3, 4), file, "2 of these shapes", "student.fc, teacher.fc")
    net, _ = pax.weights.adopt(pax.Linear(3, 4), file, ignore="teacher")
    assert np.array_equal(net.weight, one["fc.weight"].T)


def test_missing_and_unused_weights_are_listed():
    net = Free(body=pax.Linear(3, 4), head=pax.Linear(4, 2))
    error = assert_refused(net, {**dense("body", 3, 4), **dense("head", 5, 2)})
    assert "no array for head.weight[4,2], head.bias[2] (linear); near: head" in str(error)
    assert "no place for head.weight[2,5], head.bias[2]" in str(error)
    assert error.missing == ("head.weight", "head.bias")
    assert error.left == ("head.weight", "head.bias")
    kept, report = pax.weights.adopt(
        net, {**dense("body", 3, 4), **dense("head", 5, 2)}, keep="head", ignore=["head.*"]
    )
    assert kept.head.weight is net.head.weight
    assert report.kept == ("head.weight", "head.bias")
    assert report.ignored == ("head.bias", "head.weight")


def test_an_option_for_one_side_is_proposed():
    net = Free(body=pax.Linear(3, 4))
    error = assert_refused(net, {**dense("body", 3, 4), **dense("head", 4, 2)})
    assert error.write == 'ignore=["head.weight"] for what is not wanted'
    error = assert_refused(Free(body=pax.Linear(3, 4), head=pax.Linear(4, 2)), dense("body", 3, 4))
    assert error.write == 'keep=["head.weight"] for what stays as it is'


def test_grus_that_reset_after_the_product_say_so():
    file = {"weight_ih_l0": normal(6, 3), "weight_hh_l0": normal(6, 2), "bias_ih_l0": normal(6),
            "bias_hh_l0": normal(6)}  # fmt: skip
    error = assert_refused(pax.GRU(3, 2), file)
    assert "a GRU of torch fills a pax.GRU with reset_after=True" in str(error)
    file = {"gru/kernel": normal(3, 6), "gru/recurrent_kernel": normal(2, 6),
            "gru/bias": normal(2, 6)}  # fmt: skip
    error = assert_refused(pax.GRU(3, 2), file)
    assert "of Keras with reset_after=True fills a pax.GRU with reset_after=True" in str(error)


def test_a_gru_of_equinox_is_refused_by_name():
    file = {"weight_ih": normal(6, 3), "weight_hh": normal(6, 2), "bias": normal(6),
            "bias_n": normal(2)}  # fmt: skip
    error = assert_refused(pax.GRU(3, 2, reset_after=True), file)
    assert "no layer takes a GRU of Equinox" in str(error)


def test_layers_with_equal_numbers_are_two_layers():
    twice = dense("layers.1", 3, 3)
    file = {**twice, **{name.replace("1", "2"): array.copy() for name, array in twice.items()}}
    net = pax.Sequential(pax.Linear(3, 3), pax.Linear(3, 3))
    new, _ = pax.weights.adopt(net, file, origin="torch")
    assert np.array_equal(new[0].weight, new[1].weight)
    assert np.array_equal(new[0].weight, twice["layers.1.weight"].T)


def test_names_decide_with_a_word_of_the_user():
    file = {**dense("blocks.0.x", 3, 3), **dense("blocks.0.y", 3, 3), **dense("blocks.1.x", 3, 3),
            **dense("blocks.1.y", 3, 3)}  # fmt: skip
    net = Free(layers=[Free(one=pax.Linear(3, 3), two=pax.Linear(3, 3)) for _ in range(2)])
    assert_refused(net, file, origin="torch")
    new, report = pax.weights.adopt(
        net, file, origin="torch", rename={"blocks.*.x": "layers.*.two"}
    )
    assert np.array_equal(new.layers[1].two.weight, file["blocks.1.x.weight"].T)
    assert np.array_equal(new.layers[1].one.weight, file["blocks.1.y.weight"].T)
    assert [row.why for row in report.rows][2] == "rename="


def test_options_that_name_nothing_are_refused():
    net, file = Free(encoder=pax.Linear(3, 4)), dense("fc", 3, 4)
    cases = (
        ({"rename": {"fv": "encoder"}}, "fv"),
        ({"rename": {"fc": "encodr"}}, "encodr"),
        ({"rename": {"fc": "encoder.*"}}, "encoder.*"),
        ({"ignore": "head"}, "head"),
        ({"ignore": 3}, "ignore"),
        ({"keep": "head"}, "head"),
        ({"origin": "caffe"}, "caffe"),
        ({"axes": {"encoder.weight": (1, 1)}}, "axes="),
        ({"reference": 3}, "reference="),
    )
    for options, name in cases:
        with refused(pax.errors.PaxError, name):
            pax.weights.adopt(net, file, **options)


def test_numbers_that_a_leaf_has_no_room_for_are_refused():
    file = {"w": np.full((4, 8), 1e30, np.float64), "b": np.zeros(8, np.float32)}
    error = assert_refused(pax.Linear(4, 8), file, dtype="float16")
    assert error.got == "numbers that would be infinite, for a leaf of float16"
    error = assert_refused(pax.Linear(4, 8), {"w": np.ones((4, 8), int), "b": np.zeros(8, int)})
    assert "int64" in error.got


def test_an_abstract_leaf_cannot_stay():
    shapes = jax.eval_shape(lambda: Free(body=pax.Linear(3, 4), head=pax.Linear(4, 2)))
    error = assert_refused(shapes, dense("body", 3, 4), keep="head")
    assert error.where == "head.weight"
    assert error.got == "an abstract module, of jax.eval_shape"


def test_a_reference_decides_or_is_refused():
    case = CASES[0](5)
    file = {f"t{place}": array for place, array in enumerate(case.file("torch").values())}
    assert_refused(case.net, file, origin="torch")
    expected = case.forward(case.x)
    net, report = pax.weights.adopt(
        case.net, file, origin="torch", reference=(case.x, expected, case.call)
    )
    assert_close(case.call(net, case.x), expected, rtol=1e-4)
    assert report.tried >= 1
    assert "compared with the reference" in str(report)
    error = assert_refused(
        case.net, case.file("torch"), reference=(case.x, expected + 1, case.call)
    )
    assert "reference" in error.what


def test_a_reference_blind_for_two_of_many_arrays_decides_nothing():
    """The way that differs only in these two comes long after the first one that agrees."""
    apart = {name: pax.Linear(2, 2) for name in ("a", "b", "c", "d")}
    net = Free(left=pax.Linear(3, 4), right=pax.Linear(3, 4), **apart)
    file = {**dense("x", 3, 4), **dense("y", 3, 4)}
    for number in range(4):
        file |= dense(f"t{number}", 2, 2)
    x, z = normal(2, 3), normal(2, 2)

    def call(n, x, z):
        for name in apart:
            z = jnp.tanh(getattr(n, name)(z))
        return n.left(x) + n.right(x), z

    order = [f"t{number}" for number in (0, 1, 2, 3)]
    sums = sum(x @ file[f"{at}.weight"].T + file[f"{at}.bias"] for at in "xy")
    through = z
    for at in order:
        through = np.tanh(through @ file[f"{at}.weight"].T + file[f"{at}.bias"])
    error = assert_refused(net, file, origin="torch", reference=((x, z), (sums, through), call))
    assert isinstance(error, pax.errors.AmbiguousWeightsError)
    assert error.got == "2 ways that agree with the reference"


def test_of_two_nets_in_a_file_one_is_left_out():
    body = {**dense("body.0", 3, 4), **dense("body.1", 4, 4)}
    generator = {**body, **dense("head", 4, 2)}
    critic = {**dense("conv", 2, 5), **dense("score", 5, 1)}
    net = Free(body=[pax.Linear(3, 4), pax.Linear(4, 4)], head=pax.Linear(4, 2))

    def under(name, file):
        return {f"{name}.{key}": array + len(name) for key, array in file.items()}

    file = {**under("generator", generator), **under("discriminator", critic)}
    error = assert_refused(net, file)
    assert "discriminator.conv.weight" in error.left
    new, _ = pax.weights.adopt(net, file, ignore="discriminator.**")
    assert np.array_equal(new.head.weight, file["generator.head.weight"].T)

    file = {**generator, **under("ema", generator)}
    assert_refused(net, file)
    new, _ = pax.weights.adopt(net, file, ignore="ema.**")
    assert np.array_equal(new.head.weight, file["head.weight"].T)


def test_what_helps_nothing_is_not_proposed():
    file = {**dense("generator.a", 3, 5), **dense("generator.b", 5, 2), **dense("critic.a", 3, 4),
            **dense("critic.b", 4, 1)}  # fmt: skip
    error = assert_refused(Free(a=pax.Linear(3, 7), b=pax.Linear(7, 2)), file)
    assert error.write.startswith("a module of the sizes of the file; keep= and ignore=")


def test_renaming_reads_paths_as_all_of_the_library_does():
    file = {**dense("a.enc.0.x", 3, 3), **dense("a.enc.0.y", 3, 3), **dense("b.enc.1.x", 3, 3),
            **dense("b.enc.1.y", 3, 3)}  # fmt: skip
    net = Free(layers=[Free(one=pax.Linear(3, 3), two=pax.Linear(3, 3)) for _ in range(2)])
    for first in ("?.enc.*.[x]", "[ab].enc.*.x"):
        rename = {first: "layers.*.two", "?.enc.*.[!x]": "layers.*.one"}
        new, _ = pax.weights.adopt(net, file, origin="torch", rename=rename)
        assert np.array_equal(new.layers[1].two.weight, file["b.enc.1.x.weight"].T)
        assert np.array_equal(new.layers[0].one.weight, file["a.enc.0.y.weight"].T)
    rename = {"?.enc.*.x": "layers.*.two"}
    new, report = pax.weights.adopt(
        net, file, origin="torch", rename=rename, ignore="*.y", keep="*.one"
    )
    assert report.kept == tuple(f"layers.{i}.one.{k}" for i in range(2) for k in ("weight", "bias"))


def test_several_stars_of_any_number_of_steps_keep_their_order():
    file = {**dense("m.up.a.b.fc", 3, 3), **dense("m.down.c.fc", 3, 3)}
    net = Free(up=Free(a=Free(b=Free(last=pax.Linear(3, 3)))),
               down=Free(c=Free(last=pax.Linear(3, 3))))  # fmt: skip
    new, report = pax.weights.adopt(net, file, origin="torch", rename={"m.*.**.fc": "*.**.last"})
    assert np.array_equal(new.up.a.b.last.weight, file["m.up.a.b.fc.weight"].T)
    assert np.array_equal(new.down.c.last.weight, file["m.down.c.fc.weight"].T)
    assert [row.why for row in report.rows] == ["rename="] * 4
    keras = {name.replace(".", "/"): array for name, array in file.items()}
    for rename in ({"m/**/fc": "**.last"}, {"m.**.fc": "**.last"}, {"**/fc": "m.**.last"}):
        around = Free(m=net) if "**/fc" in rename else net
        target = {"**/fc": "**.last"} if "**/fc" in rename else rename
        new, _ = pax.weights.adopt(around, keras, origin="torch", rename=target)
        found = new.m if around is not net else new
        assert np.array_equal(found.up.a.b.last.weight, file["m.up.a.b.fc.weight"].T)


def test_an_array_of_fewer_axes_than_a_leaf_of_ones_own_is_no_crash():
    net = Free(body=Free(w=np.ones((4, 8), np.float32), b=np.ones(8, np.float32)))
    error = assert_refused(net, {"norm.weight": normal(8), "norm.bias": normal(8)}, origin="torch")
    assert error.missing == ("body.w", "body.b")


def test_a_name_may_be_told_of_one_leaf_of_a_layer():
    """As the message of a refusal writes it."""
    file = {**dense("x", 3, 4), **dense("y", 4, 2)}
    net = Free(a=pax.Linear(3, 4), b=pax.Linear(4, 2))
    for rename in ({"x.weight": "a.weight"}, {"x.weight": "a.weight", "x.bias": "a.bias"}):
        new, report = pax.weights.adopt(net, file, origin="torch", rename=rename)
        assert np.array_equal(new.a.weight, file["x.weight"].T)
        assert np.array_equal(new.b.bias, file["y.bias"])
        assert report.rows[0].why == "rename="


def test_leaves_of_a_layer_may_be_told_from_two_of_the_file():
    file = {**dense("x", 3, 3), **dense("y", 3, 3)}
    net = Free(l=pax.Linear(3, 3), r=pax.Linear(3, 3))
    rename = {"x.weight": "l.weight", "y.bias": "l.bias"}
    new, _ = pax.weights.adopt(net, file, origin="torch", rename=rename)
    assert np.array_equal(new.l.weight, file["x.weight"].T)
    assert np.array_equal(new.l.bias, file["y.bias"])
    assert np.array_equal(new.r.weight, file["y.weight"].T)
    assert np.array_equal(new.r.bias, file["x.bias"])
    twins = {**dense("x", 3, 3), **dense("y", 3, 3)}
    error = assert_refused(net, twins, origin="torch", rename={"x.weight": "l.weight"})
    assert isinstance(error, pax.errors.AmbiguousWeightsError)  # whose is the bias?


def test_all_arrays_of_other_kinds_of_numbers_are_named():
    net = Free(a=pax.Linear(3, 4), b=pax.Linear(4, 2))
    file = {**dense("a", 3, 4), **dense("b", 4, 2)}
    file["a.bias"] = np.arange(4)
    assert assert_refused(net, file).got == "a.bias of int64 for a.bias of float32"
    file["b.weight"] = file["b.weight"].astype(complex)
    error = assert_refused(net, file)
    assert "a.bias of int64 for a.bias of float32" in error.got
    assert "b.weight of complex128 for b.weight of float32" in error.got
