"""Operations of TensorFlow that touch files, other processes or the network.

TensorFlow says of itself that a model is a program, which may "read and write files, send and
receive data over the network, and even spawn additional processes" (SECURITY.md, "TensorFlow
models are programs").  Its own list for scanning is `_OP_DENYLIST` of
``tensorflow/python/tools/saved_model_cli.py``: WriteFile, ReadFile, PrintV2.  The last one only
prints, unless it is told to append to a file.

That list names the worst only.  The one below was made by going through all 1,451 operations of
``tf.raw_ops`` in TensorFlow 2.21, and what each is documented to do.  A name stands for all of
its versions: ``ReadFile`` for ``ReadFileV2`` and ``ExperimentalReadFile``, too.
"""

from __future__ import annotations

import re
from typing import NamedTuple

#: What `saved_model_cli scan` reports, besides PrintV2.
_OF_TENSORFLOW = "WriteFile ReadFile"

#: Operations that read or write a file, whose name may be a constant in the graph.
_FILES = """
MatchingFiles RecordInput ImmutableConst Skipgram
LoadAndRemapMatrix GenerateVocabRemapping Save SaveSlices Restore RestoreSlice DistributedSave
WholeFileReader TextLineReader FixedLengthRecordReader TFRecordReader LMDBReader
TextLineDataset FixedLengthRecordDataset TFRecordDataset CSVDataset LMDBDataset SqlDataset
MatchingFilesDataset DatasetToTFRecord CacheDataset LoadDataset SaveDataset SnapshotDataset
SnapshotChunkDataset SnapshotDatasetReader SnapshotNestedDatasetReader ListSnapshotChunksDataset
CreateSummaryFileWriter CreateSummaryDbWriter SummaryWriter WriteSummary WriteAudioSummary
WriteGraphSummary WriteHistogramSummary WriteImageSummary WriteRawProtoSummary
WriteScalarSummary ImportEvent FlushSummaryWriter CloseSummaryWriter
StatsAggregatorSetSummaryWriter FileSystemSetConfiguration InitializeTRTResource
"""

#: Operations that talk to others, or to a debugger at an address that stands in the graph.
_NETWORK = """
Send Recv HostSend HostRecv RemoteCall DataServiceDataset RegisterDataset WorkerHeartbeat
CollectiveAllToAll CollectiveAssignGroup CollectiveBcastRecv CollectiveBcastSend
CollectiveGather CollectiveInitializeCommunicator CollectivePermute CollectiveReduce
CollectiveReduceScatter NcclAllReduce NcclBroadcast NcclReduce BigQueryReader
DebugIdentity DebugNanCount DebugNumericSummary Copy CopyHost
"""

#: Operations that call Python or a library, end the process, or run a graph that stands as
#: bytes in a constant, where nothing else would find its operations.
_PROCESSES = """
PyFunc PyFuncStateless EagerPyFunc Abort DatasetFromGraph DeserializeIterator
RemoteFusedGraphExecute TRTEngineOp
"""

#: Where a program may print: no other process reads it as data.
_STREAMS = (b"stderr", b"stdout", b"log(info)", b"log(warning)", b"log(error)")


class Attribute(NamedTuple):
    """An attribute that may name a file, and the texts of it that do not."""

    name: str
    texts: tuple[bytes, ...]
    beginnings: tuple[bytes, ...] = ()

    def names_no_file(self, text: bytes) -> bool:
        return text in self.texts or text.startswith(self.beginnings)


_DESCRIPTORS = Attribute("descriptor_source", (b"", b"local://"), (b"bytes://",))
#: They touch a file only if an attribute names one; without the attribute they touch none.
BY_ATTRIBUTE = {
    "DecodeProto": _DESCRIPTORS,
    "EncodeProto": _DESCRIPTORS,
    "FixedUnigramCandidateSampler": Attribute("vocab_file", (b"",)),
    "Print": Attribute("output_stream", _STREAMS),
}

#: They read a vocabulary; the number of the input that is the name of its file.
TABLE_FILES = {"InitializeTableFromTextFile": (1,)}
#: They read and write a checkpoint; the numbers of the inputs that are names of its files.
CHECKPOINTS = {"SaveV2": (0,), "RestoreV2": (0,), "MergeV2Checkpoints": (0, 1)}

#: Packages of operations that are there for files and the network: tensorflow-io.
_PACKAGES = ("IO>", "Kafka", "BigQuery", "Bigtable", "Pubsub", "Kinesis", "Arrow", "Parquet")

_NAMES = frozenset(
    re.sub(r"V\d+$", "", name)
    for name in " ".join((_OF_TENSORFLOW, _FILES, _NETWORK, _PROCESSES)).split()
)
_AROUND = re.compile(r"^_*(?:Experimental)?|V\d+$")


def plain_name(operation: str) -> str:
    """The name without what tells its versions apart.

    Example:
        >>> plain_name("ExperimentalCSVDataset"), plain_name("TFRecordDatasetV2")
        ('CSVDataset', 'TFRecordDataset')
    """
    return _AROUND.sub("", operation)


def is_dangerous(operation: str) -> bool:
    """Whether an operation is refused wherever it stands.

    Example:
        >>> is_dangerous("ReadFile"), is_dangerous("MatMul"), is_dangerous("RestoreV2")
        (True, False, False)
    """
    if operation in CHECKPOINTS:
        return False
    return plain_name(operation) in _NAMES or operation.startswith(_PACKAGES)
