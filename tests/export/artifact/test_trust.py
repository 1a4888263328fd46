"""A SavedModel is a program: what it would do is read before it can do it."""

import shutil
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

from pax_export.errors import ExportPathError, UntrustedExportError
from pax_export.export import load, retarget, spec, to_saved_model
from pax_export.export.artifact.screening import screen
from tests.consumers.foreign import each_node
from tests.export import attacks
from tests.export.models import affine, affine_params, random
from tests.refusals import refused


@pytest.fixture(scope="module")
def tf():
    return pytest.importorskip("tensorflow")


@pytest.fixture(scope="module")
def honest(tmp_path_factory):
    path = tmp_path_factory.mktemp("honest") / "model"
    model, x = (affine_params(), affine), spec("n, 3")
    to_saved_model(model, path, x, operations="xla", validate=False)
    return path


@pytest.fixture
def model(honest, tmp_path):
    shutil.copytree(honest, tmp_path / "model")
    (tmp_path / "model" / "SHA256SUMS").unlink()  # who changes it would change this, too
    return tmp_path / "model"


def changed(path, change):
    """Changes the graph of a SavedModel; who does so would change the list of hashes, too."""
    from tensorflow.core.protobuf.saved_model_pb2 import SavedModel

    message = SavedModel()
    message.ParseFromString((path / "saved_model.pb").read_bytes())
    change(message)
    (path / "saved_model.pb").write_bytes(message.SerializeToString())
    (path / "SHA256SUMS").unlink(missing_ok=True)
    return path


def add(nodes, operation, *inputs, name="evil"):
    node = nodes.add(op=operation, name=name)
    node.input.extend(inputs)
    return node


# --- what runs as soon as it is loaded ---------------------------------------------------


def writes(tf, target):
    class Resource(tf.saved_model.experimental.TrackableResource):
        def _create_resource(self):
            return tf.raw_ops.HashTableV2(key_dtype=tf.int64, value_dtype=tf.int64)

        def _initialize(self):
            tf.io.write_file(str(target), "x")

    module = tf.Module()
    module.resource = Resource()

    @tf.function(input_signature=[tf.TensorSpec([None, 3], tf.float32, name="x")])
    def function(x):
        size = tf.raw_ops.LookupTableSizeV2(table_handle=module.resource.resource_handle)
        return {"output": x + tf.cast(size, x.dtype)}

    module.function = function
    return module


@pytest.fixture
def writer(tf, honest, tmp_path):
    target, path = tmp_path / "written", tmp_path / "writer"
    made = writes(tf, target)
    tf.saved_model.save(made, str(path), signatures=made.function)
    shutil.copy(honest / "pax_export.json", path)
    target.unlink(missing_ok=True)
    return path, target


def test_a_program_that_writes_when_it_is_loaded_is_refused_before(writer):
    path, target = writer
    with refused(UntrustedExportError, "WriteFile in __inference", "trusted=True", where=str(path)):
        load(path)
    assert not target.exists()
    with pytest.raises(ExportPathError):  # it is no export of ours, but it is let through
        load(path, trusted=True)
    assert target.exists()


def test_attacks_leave_no_trace(tf, tmp_path):
    """In a process of their own: one of them would wait for ever, one opens a port."""
    command = [sys.executable, "-m", "tests.export.attacks", str(tmp_path)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=300, cwd=Path(__file__).parents[3]
    )
    lines = done.stdout.splitlines()
    operations = ["CalibrationStatisticsSaver", "DumpTensor", "RpcServerStart", "QueueDequeueV2"]
    for attack, operation in zip(attacks.ATTACKS, operations, strict=True):
        for opened in ("load", "Rechecked"):
            said = f"{opened} {attack.__name__} UntrustedExportError {operation} in __inference"
            assert any(line.startswith(said) for line in lines), done.stdout + done.stderr[-2000:]
    assert lines[-2:] == ["traces", "trusted dumped victim"]


def test_retarget_runs_no_such_program(writer):
    path, target = writer
    with pytest.raises((UntrustedExportError, ExportPathError)):
        retarget(path, out=path.parent / "mended")
    assert not target.exists()


# --- wherever it stands ------------------------------------------------------------------


def in_graph(message):
    add(message.meta_graphs[0].graph_def.node, "ReadFile")


def in_uncalled_function(message):
    function = message.meta_graphs[0].graph_def.library.function.add()
    function.signature.name = "never_called"
    add(function.node_def, "WriteFile")


def in_gradient(message):
    library = message.meta_graphs[0].graph_def.library
    function = library.function.add()
    function.signature.name = "gradient"
    add(function.node_def, "EagerPyFunc")
    library.registered_gradients.add(gradient_func="gradient", registered_op_type="CustomGradient")


def in_attribute(operation, name, text):
    def change(message):
        add(message.meta_graphs[0].graph_def.node, operation).attr[name].s = text

    return change


def in_attribute_of_the_caller(message):
    """The function leaves the text open, and whoever calls it gives one."""
    (graph,) = message.meta_graphs
    function = graph.graph_def.library.function.add()
    function.signature.name = "printing"
    function.signature.attr.add(name="where", type="string")
    add(function.node_def, "PrintV2").attr["output_stream"].placeholder = "where"
    add(graph.graph_def.node, "printing").attr["where"].s = b"file:///tmp/evil"


def in_called_operation(message):
    node = add(message.meta_graphs[0].graph_def.node, "PartitionedCall")
    node.attr["f"].func.name = "DumpTensor"


def in_program_of_the_caller(message):
    for _, node in each_node(message, "XlaCallModule"):
        node.attr["module"].placeholder = "module"


def in_many_functions(message):
    for number in range(8):
        function = message.meta_graphs[0].graph_def.library.function.add()
        function.signature.name = f"evil_{number}"
        add(function.node_def, "ReadFile")


def in_saver(message):
    """Whoever calls the signature would say which file is read."""
    (graph,) = message.meta_graphs
    graph.signature_def["serving_default"].inputs["file"].name = "saver/file:0"


def in_name_of_an_operation(message):
    function = message.meta_graphs[0].graph_def.library.function.add()
    function.signature.name = "Identity"


PLACES = {
    "graph": (in_graph, "ReadFile in the graph"),
    "function": (
        lambda m: add(m.meta_graphs[0].graph_def.library.function[-1].node_def, "PyFunc"),
        "PyFunc in ",
    ),
    "uncalled function": (in_uncalled_function, "WriteFile in never_called"),
    "gradient": (in_gradient, "EagerPyFunc in gradient"),
    "second graph": (
        lambda m: add(m.meta_graphs.add().graph_def.node, "MatchingFiles"),
        "MatchingFiles in ",
    ),
    "path of an attribute": (
        in_attribute("DecodeProtoV2", "descriptor_source", b"/etc/passwd"),
        "DecodeProtoV2 in ",
    ),
    "stream of an attribute": (
        in_attribute("PrintV2", "output_stream", b"file:///etc/cron.d/evil"),
        "PrintV2 in ",
    ),
    "attribute of the caller": (in_attribute_of_the_caller, "PrintV2 in printing"),
    "called operation": (in_called_operation, "DumpTensor", "PartitionedCall"),
    "program of the caller": (in_program_of_the_caller, "XlaCallModule in "),
    "many functions": (in_many_functions, "ReadFile in evil_4, and 3 more"),
    "name of an operation": (in_name_of_an_operation, "a function called Identity"),
    "saver": (in_saver, "RestoreV2 in the graph"),
}


@pytest.mark.parametrize("place", PLACES)
def test_it_is_found_wherever_it_stands(model, place):
    change, *names = PLACES[place]
    with refused(UntrustedExportError, *names):
        load(changed(model, change))


# --- the programs of StableHLO in it -----------------------------------------------------


def with_module(path, text):
    def exchange(message):
        for _, node in each_node(message, "XlaCallModule"):
            node.attr["module"].s = text if isinstance(text, bytes) else attacks.module(text)

    return changed(path, exchange)


PROGRAMS = {
    name: (attacks.NESTED.replace("TARGET", name), f"{name} of XlaCallModule in ")  # in a branch
    for name in ("memset", "system", "lapack_spotrf_ffi", "a name")
} | {
    "that waits indefinitely": (attacks.WAITING, "infeed of XlaCallModule in "),
    "that cannot be read": (b"ML\xefRcustom_call", "XlaCall"),
    "no program": (b"custom\\_call", "XlaCall"),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_with_a_call_or_a_wait_is_named(model, program):
    text, name = PROGRAMS[program]
    with refused(UntrustedExportError, name):
        load(with_module(model, text))


@pytest.mark.parametrize("target", ["Sharding", "shape_assertion", "tf.call_tf_function"])
def test_a_custom_call_that_xla_writes_out_is_let_through(model, target):
    screen(with_module(model, attacks.NESTED.replace("TARGET", target)))


@pytest.mark.parametrize(
    "operation",
    ["ReadFile", "WriteFile", "PyFunc", "EagerPyFunc", "PyFuncStateless", "Abort",
     "ExperimentalSqlDataset", "TFRecordDatasetV2", "DataServiceDatasetV4", "SnapshotDatasetV2",
     "DebugIdentityV3", "_Send", "RemoteCall", "ImmutableConst", "TextLineReaderV2",
     "CreateSummaryFileWriter", "SaveSlices", "Restore", "DatasetFromGraph", "IO>ReadParquet",
     "FileSystemSetConfiguration", "CollectiveReduceV2", "CalibrationStatisticsSaver",
     "DumpTensor", "RpcServer", "RpcClient", "QueueDequeueV2", "QueueDequeue", "Barrier", "Stage",
     "MapUnstage", "Copy", "XlaCustomCallV2", "XlaLaunch", "SleepDataset", "MutexLock",
     "CustomAggregator", "TPUExecute", "SentencepieceOp", "OperationOfTomorrow"],
)  # fmt: skip
def test_what_touches_the_world_and_what_nobody_knows_is_refused(model, operation):
    changed(model, lambda message: add(message.meta_graphs[0].graph_def.node, operation))
    with refused(UntrustedExportError, f"{operation} in the graph"):
        screen(model)


@pytest.mark.parametrize(
    "operation",
    ["MatMul", "StatefulPartitionedCall", "ReadVariableOp", "HashTableV2", "LookupTableImportV2",
     "LookupTableExportV2", "ShardedFilename", "TensorArrayWriteV3", "DecodeJpeg", "DeepCopy",
     "Fingerprint", "Assert", "RngReadAndSkip", "Print", "PrintV2", "CudnnRNNV3", "ResourceGather",
     "MutableHashTableV2", "LookupTableFindV2", "LookupTableInsertV2", "ResourceApplyAdam",
     "RaggedTensorToVariant", "StringNGrams", "TensorSliceDataset"],
)  # fmt: skip
def test_what_computes_is_not(model, operation):
    screen(changed(model, lambda message: add(message.meta_graphs[0].graph_def.node, operation)))


# --- what honest models do ---------------------------------------------------------------


def vocabulary(tf, file):
    table = tf.lookup.StaticVocabularyTable(tf.lookup.TextFileInitializer(
        str(file), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE,
        tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER,
    ), num_oov_buckets=1)  # fmt: skip
    return lambda text: tf.cast(table.lookup(text), tf.int32)


@pytest.fixture(scope="module")
def model_of_words(tf, tmp_path_factory):
    """An export of ours with a vocabulary, which TensorFlow saved, with its saver."""
    folder = tmp_path_factory.mktemp("words")
    (folder / "words.txt").write_text("good\nbad\nfilm\n")
    to_saved_model(
        ({"score": jnp.arange(4.0)}, lambda params, tokens: params["score"][tokens]),
        folder / "words",
        spec("n", "int32"),
        preprocess=vocabulary(tf, folder / "words.txt"),
        preprocess_inputs=spec("n", "string"),
        validate=False,
    )
    (folder / "words.txt").unlink()
    return folder / "words"


@pytest.fixture
def words(model_of_words, tmp_path):
    return shutil.copytree(model_of_words, tmp_path / "words")


def test_a_vocabulary_and_the_saver_of_tensorflow_are_let_through(words):
    assert load(words)(["bad", "unknown"]).tolist() == [1.0, 3.0]


@pytest.mark.parametrize("stream", [None, "stdout", "log(info)"])
def test_a_preprocessor_that_prints_is_let_through(tf, tmp_path, stream):
    streams = {"stdout": sys.stdout, "log(info)": tf.compat.v1.logging.info}
    where = {} if stream is None else {"output_stream": streams[stream]}

    def preprocess(x):
        tf.print("a batch of", tf.shape(x)[0], **where)
        return 2 * x

    to_saved_model(
        (affine_params(), affine), tmp_path / "m", spec("n, 3"), validate=False,
        preprocess=preprocess, preprocess_inputs=spec("n, 3"),
    )  # fmt: skip
    assert b"PrintV2" in (tmp_path / "m" / "saved_model.pb").read_bytes()
    assert load(tmp_path / "m")(random(2, 3)).shape == (2, 4)


def test_a_preprocessor_that_prints_into_a_file_is_not(tf, tmp_path):
    def preprocess(x):
        tf.print("a batch", output_stream=f"file://{tmp_path}/printed")
        return x

    to_saved_model(
        (affine_params(), affine), tmp_path / "m", spec("n, 3"), validate=False,
        preprocess=preprocess, preprocess_inputs=spec("n, 3"),
    )  # fmt: skip
    (tmp_path / "printed").unlink(missing_ok=True)
    with refused(UntrustedExportError, "PrintV2 in "):
        load(tmp_path / "m")
    assert not (tmp_path / "printed").exists()


# --- vocabularies of TensorFlow 1 --------------------------------------------------------


def of_tensorflow_1(tf, folder, listed_as="collection", runs="main_op", buckets=0):
    """A SavedModel of a graph with a vocabulary, as builders of TensorFlow 1 write it."""
    v1 = tf.compat.v1
    (folder / "words.txt").write_text("good\nbad\nfilm\n")
    with tf.Graph().as_default() as graph, v1.Session() as session:
        text = v1.placeholder(tf.string, [None], name="text")
        words = tf.lookup.TextFileInitializer(
            str(folder / "words.txt"), tf.string, tf.lookup.TextFileIndex.WHOLE_LINE,
            tf.int64, tf.lookup.TextFileIndex.LINE_NUMBER,
        )  # fmt: skip
        known = tf.lookup.StaticHashTable(words, 0)
        table = tf.lookup.StaticVocabularyTable(words, buckets) if buckets else known
        scores = v1.get_variable("scores", initializer=[0.0, 1.0, 2.0, 3.0], use_resource=False)
        found = {"score": tf.gather(scores, table.lookup(text), name="scored")}
        ready = tf.group(v1.tables_initializer(), name="ready")
        session.run([v1.global_variables_initializer(), ready])
        builder = v1.saved_model.Builder(str(folder / "old"))
        builder.add_meta_graph_and_variables(
            session, ["serve"],
            {"serving_default": v1.saved_model.predict_signature_def({"text": text}, found)},
            assets_collection=graph.get_collection(v1.GraphKeys.ASSET_FILEPATHS), **{runs: ready},
        )  # fmt: skip
        builder.save()
    (folder / "words.txt").unlink()
    if listed_as == "asset_file_def":
        changed(folder / "old", with_assets_listed_in_both_ways)
    return folder / "old"


def with_assets_listed_in_both_ways(message):
    """The builder lists them where TensorFlow 1 did; some wrote them where TensorFlow 2 does."""
    (graph,) = message.meta_graphs
    for packed in graph.collection_def["saved_model_assets"].any_list.value:
        packed.Unpack(graph.asset_file_def.add())


@pytest.mark.filterwarnings("ignore")  # TensorFlow's own, of what it calls deprecated
@pytest.mark.parametrize("listed_as", ["asset_file_def", "collection"])
@pytest.mark.parametrize(
    ("runs", "buckets"), [("main_op", 0), ("legacy_init_op", 0), ("main_op", 1)]
)
def test_a_vocabulary_of_tensorflow_1_is_let_through(tf, tmp_path, listed_as, runs, buckets):
    path = of_tensorflow_1(tf, tmp_path, listed_as, runs, buckets)
    screen(path)
    signature = tf.saved_model.load(str(path)).signatures["serving_default"]
    scores = signature(text=tf.constant(["film", "bad", "unknown"]))["score"]
    assert scores.numpy().tolist() == [2.0, 1.0, 3.0 if buckets else 0.0]


def test_one_that_tensorflow_2_has_loaded_and_saved_again(tf, tmp_path):
    loaded = tf.saved_model.load(str(of_tensorflow_1(tf, tmp_path)))
    tf.saved_model.save(loaded, str(tmp_path / "new"), signatures=dict(loaded.signatures))
    screen(tmp_path / "new")


@pytest.fixture(scope="module")
def old_model(tf, tmp_path_factory):
    return of_tensorflow_1(tf, tmp_path_factory.mktemp("old"))


@pytest.fixture
def old(old_model, tmp_path):
    return shutil.copytree(old_model, tmp_path / "old")


def table_reader(message):
    (graph,) = message.meta_graphs
    (found,) = (n for n in graph.graph_def.node if n.op == "InitializeTableFromTextFileV2")
    return graph, found


def named(graph, name):
    (found,) = (each for each in graph.graph_def.node if each.name == name)
    return found


def another_path(graph, reader):
    constant(graph.graph_def.node, b"/etc/passwd")
    reader.input[1] = "elsewhere"


def read_in_a_function(graph, reader):
    """A function is run by whoever calls it, with what stands in the graph."""
    function = graph.graph_def.library.function.add()
    function.signature.name = "reading"
    for name in ("table", "file"):
        function.signature.input_arg.add(name=name)
    function.node_def.add().CopyFrom(reader)
    function.node_def[0].input[:] = ["table", "file"]
    add(graph.graph_def.node, "reading", *reader.input, name="call")


def outputs(graph):
    return graph.signature_def["again"].outputs["it"]


READ = {
    # A call waits for the table to be read again, from where nobody gives another path.
    "by a signature": lambda graph, r: named(graph, "scored").input.append(f"^{r.name}"),
    "by way of a group": lambda graph, r: named(graph, "scored").input.append("^ready"),
    "by the saver": lambda graph, r: named(graph, graph.saver_def.restore_op_name).input.append(
        f"^{r.name}"
    ),
    "by a variable": lambda graph, r: named(graph, "scores/Assign").input.append(f"^{r.name}"),
    "named by a signature": lambda graph, r: setattr(outputs(graph), "name", r.name),
    "named in parts": lambda graph, r: setattr(
        outputs(graph).coo_sparse, "values_tensor_name", r.name
    ),
    "fed in parts": lambda graph, r: setattr(
        graph.signature_def["again"].inputs["it"].coo_sparse,
        "values_tensor_name",
        f"{r.input[1]}:0",
    ),
    "from another path": another_path,
    "in a function": read_in_a_function,
}


@pytest.mark.parametrize("how", READ)
def test_a_vocabulary_of_tensorflow_1_that_looks_honest(old, how):
    screen(old)
    changed(old, lambda message: READ[how](*table_reader(message)))
    with refused(UntrustedExportError, "InitializeTableFromTextFileV2 in "):
        screen(old)


@pytest.mark.parametrize("also", [lambda message: None, with_assets_listed_in_both_ways])
def test_assets_of_tensorflow_1_outside_of_the_folder_are_refused(old, also):
    def rename(message):
        (packed,) = message.meta_graphs[0].collection_def["saved_model_assets"].any_list.value
        packed.value = packed.value.replace(b"\x12\x09words.txt", b"\x12\x09../secret")
        also(message)

    changed(old, rename)
    with refused(UntrustedExportError, "a vocabulary at '../secret'"):
        screen(old)


# --- what looks honest -------------------------------------------------------------------


def constant(nodes, text):
    node = add(nodes, "Const", name="elsewhere")
    node.attr["value"].tensor.string_val.append(text)
    node.attr["value"].tensor.dtype = node.attr["dtype"].type = 7
    return node


def in_place_of_the_asset(message):
    ((function, node),) = each_node(message, "InitializeTableFromTextFileV2")
    constant(function.node_def, b"/etc/passwd")
    node.input[1] = "elsewhere:output:0"


def named_by_a_caller(message):
    """The function is honest, and its caller hands it another file."""
    (graph,) = message.meta_graphs
    ((function, _),) = each_node(message, "InitializeTableFromTextFileV2")
    constant(graph.graph_def.node, b"/etc/passwd")
    inputs = ["elsewhere:0"] * len(function.signature.input_arg)
    add(graph.graph_def.node, function.signature.name, *inputs)


def in_a_variable(message):
    graph = message.meta_graphs[0].graph_def
    constant(graph.node, b"/etc/passwd")
    add(graph.node, "AssignVariableOp", "Variable", "elsewhere")


def in_a_variable_of_the_same_name(message):
    graph = message.meta_graphs[0].graph_def
    constant(graph.node, b"/etc/passwd")
    graph.node.add().CopyFrom(named(message.meta_graphs[0], "Variable"))
    graph.node[-1].name = "Other"
    add(graph.node, "AssignVariableOp", "Other", "elsewhere")


def fed_by_a_caller(message):
    (graph,) = message.meta_graphs
    signature = graph.signature_def["serving_default"]
    signature.inputs["file"].name = graph.asset_file_def[0].tensor_info.name


def in_an_asset_with_a_value(message):
    """A loader feeds the tensor of an asset once; who runs it later gets the value of the graph."""
    (graph,) = message.meta_graphs
    constant(graph.graph_def.node, b"/etc/passwd")
    graph.asset_file_def[0].tensor_info.name = "elsewhere:0"
    (assign,) = (n for n in graph.graph_def.node if n.op == "AssignVariableOp")
    assign.input[1] = "elsewhere"


def looped(message):
    """A loop or a branch hands its own inputs to the function."""
    ((function, _),) = each_node(message, "InitializeTableFromTextFileV2")
    node = add(message.meta_graphs[0].graph_def.node, "StatelessIf")
    node.attr["then_branch"].func.name = function.signature.name


def twice(message):
    ((function, _),) = each_node(message, "InitializeTableFromTextFileV2")
    message.meta_graphs[0].graph_def.library.function.add().CopyFrom(function)


def differentiated(message):
    ((function, _),) = each_node(message, "InitializeTableFromTextFileV2")
    library = message.meta_graphs[0].graph_def.library
    library.gradient.add(function_name="f", gradient_func=function.signature.name)


@pytest.mark.parametrize(
    "change",
    [in_place_of_the_asset, named_by_a_caller, in_a_variable, in_a_variable_of_the_same_name,
     fed_by_a_caller, in_an_asset_with_a_value, looped, twice, differentiated],
)  # fmt: skip
def test_a_vocabulary_that_looks_honest(words, change):
    with refused(UntrustedExportError, "InitializeTableFromTextFileV2 in "):
        load(changed(words, change))


@pytest.mark.parametrize("name", ["../../../etc/passwd", "/etc/passwd", "..\\secret"])
def test_assets_outside_of_the_folder_are_refused(words, name):
    def rename(message):
        message.meta_graphs[0].asset_file_def[0].filename = name

    with refused(UntrustedExportError, "a vocabulary at "):
        load(changed(words, rename))


def test_an_asset_that_is_a_link(words, tmp_path):
    (words / "SHA256SUMS").unlink()
    (asset,) = (words / "assets").iterdir()
    asset.unlink()
    (tmp_path / "secret").write_text("secret\n")
    asset.symlink_to(tmp_path / "secret")
    with refused(UntrustedExportError, "a vocabulary at "):
        load(words)


@pytest.mark.parametrize("operation", ["RestoreV2", "SaveV2", "MergeV2Checkpoints"])
def test_a_saver_that_chooses_its_own_path(words, operation):
    def point_elsewhere(message):
        function, node = next(each_node(message, operation))
        constant(function.node_def, b"/etc/cron.d/evil")
        node.input[0] = "elsewhere:output:0"

    with refused(UntrustedExportError, operation):
        load(changed(words, point_elsewhere))


def test_a_path_that_leads_away_at_its_end(words):
    def lead_away(message):
        for _, node in each_node(message, "Const"):
            values = node.attr["value"].tensor.string_val
            if any(b"part" in each for each in values):
                values[0] = b"/../../../etc/cron.d/part"

    with refused(UntrustedExportError, "SaveV2"):
        load(changed(words, lead_away))


def test_a_graph_of_another_kind_is_no_way_around(model):
    """TensorFlow reads text where there is no binary file."""
    (model / "saved_model.pb").rename(model / "saved_model.pbtxt")
    with refused(ExportPathError, where=str(model)):
        load(model)


# --- a folder that says how it was written -----------------------------------------------


@pytest.mark.parametrize("file", ["saved_model.pb", "pax_export.json", "assets/words.txt"])
def test_a_changed_file_is_named(words, file):
    content = bytearray((words / file).read_bytes())
    content[len(content) // 2] ^= 0x20
    (words / file).write_bytes(content)
    with pytest.raises(ExportPathError) as caught:
        load(words)
    assert Path(file).name in f"{caught.value.where} {caught.value.got}"


def test_a_list_without_the_graph_is_refused(words):
    lines = (words / "SHA256SUMS").read_text().splitlines(keepends=True)
    kept = "".join(line for line in lines if "saved_model.pb" not in line)
    (words / "SHA256SUMS").write_text(kept)
    with refused(ExportPathError, got="saved_model.pb"):
        load(words)


def test_damaged_artifacts_are_refused_even_if_trusted(words):
    (words / "assets" / "words.txt").write_text("bad\ngood\nfilm\n")
    with refused(ExportPathError, "words.txt"):
        load(words, trusted=True)
