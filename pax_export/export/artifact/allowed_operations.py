"""The allowlist of TensorFlow operations in untrusted SavedModels; others are refused by name.

The lists were made from the operations of TensorFlow 2.15, 2.17, 2.19 and 2.21: stateful ones,
those without a CPU kernel, and internal ones (``_...``) are refused, with few exceptions. Each
other operation is in `ALLOWED` or `REFUSED`: `tests/consumers/test_served_operations.py` checks it.

``A/V2`` means ``A`` and ``AV2``. This file imports nothing, so that a test can run it alone.
"""

from __future__ import annotations

from typing import NamedTuple

#: They compute from their inputs alone: no state, no file, no address among inputs or attributes.
_MATHEMATICS = """
Abs AccumulateNV2 Acos Acosh Add/V2 AddN AdjustContrast/v2 AdjustHue AdjustSaturation All Angle
Any ApproximateEqual ApproxTopK ArgMax ArgMin Asin Asinh Atan Atan2 Atanh AvgPool/Grad
AvgPool3D/Grad BandedTriangularSolve BatchCholesky/Grad BatchFFT BatchFFT2D BatchFFT3D BatchIFFT
BatchIFFT2D BatchIFFT3D BatchMatMul/V2/V3 BatchMatrixBandPart BatchMatrixDeterminant
BatchMatrixDiag BatchMatrixDiagPart BatchMatrixInverse BatchMatrixSetDiag BatchMatrixSolve
BatchMatrixSolveLs BatchMatrixTriangularSolve BatchNormWithGlobalNormalization/Grad
BatchSelfAdjointEig/V2 BatchSvd BatchToSpace BatchToSpaceND BesselI0 BesselI0e BesselI1 BesselI1e
BesselJ0 BesselJ1 BesselK0 BesselK0e BesselK1 BesselK1e BesselY0 BesselY1 Betainc BiasAdd/Grad/V1
Bincount Bitcast BitwiseAnd BitwiseOr BitwiseXor BlockLSTM/Grad/GradV2/V2 BroadcastArgs
BroadcastGradientArgs BroadcastTo Bucketize Cast Ceil Cholesky/Grad ClipByValue
CombinedNonMaxSuppression Complex ComplexAbs CompositeTensorVariantFromComponents
CompositeTensorVariantToComponents Concat/V2 ConcatOffset Conj ConjugateTranspose Conv Conv2D
Conv2DBackpropFilter/V2 Conv2DBackpropInput/V2 Conv3D Conv3DBackpropFilter/V2
Conv3DBackpropInput/V2 Cos Cosh CropAndResize CropAndResizeGradBoxes CropAndResizeGradImage Cross
CSRSparseMatrixComponents CSRSparseMatrixToDense CSRSparseMatrixToSparseTensor
CTCBeamSearchDecoder CTCGreedyDecoder CTCLoss/V2 CudnnRNNCanonicalToParams/V2 CudnnRNNParamsSize
CudnnRNNParamsToCanonical/V2 Cumprod Cumsum CumulativeLogsumexp DataFormatDimMap
DataFormatVecPermute Dawsn DebugGradientIdentity DebugGradientRefIdentity DenseBincount
DenseCountSparseOutput DenseToCSRSparseMatrix DenseToDenseSetOperation DenseToSparseSetOperation
DepthToSpace DepthwiseConv2dNative DepthwiseConv2dNativeBackpropFilter
DepthwiseConv2dNativeBackpropInput Dequantize DeserializeManySparse DeserializeSparse Diag
DiagPart Digamma Dilation2D Dilation2DBackpropFilter Dilation2DBackpropInput Div DivNoNan
DrawBoundingBoxes/V2 DynamicPartition DynamicStitch EditDistance Eig Einsum Elu/Grad
EmptyTensorList EmptyTensorMap EnsureShape Equal Erf Erfc Erfinv EuclideanNorm Exp ExpandDims
Expint Expm1 ExtractGlimpse/V2 ExtractImagePatches ExtractVolumePatches FakeQuantWithMinMaxArgs
FakeQuantWithMinMaxArgsGradient FakeQuantWithMinMaxVars FakeQuantWithMinMaxVarsGradient
FakeQuantWithMinMaxVarsPerChannel FakeQuantWithMinMaxVarsPerChannelGradient FFT FFT2D FFT3D FFTND
Fill Floor FloorDiv FloorMod FractionalAvgPool/Grad FractionalMaxPool/Grad FresnelCos FresnelSin
FusedBatchNorm/Grad/GradV2/GradV3/V2/V3 FusedPadConv2D FusedResizeAndPadConv2D Gather/V2 GatherNd
GenerateBoundingBoxProposals Greater GreaterEqual GRUBlockCell/Grad HistogramFixedWidth HSVToRGB
Identity IdentityN IFFT IFFT2D IFFT3D IFFTND Igamma Igammac IgammaGradA Imag
ImageProjectiveTransformV2 ImageProjectiveTransformV3 InplaceAdd InplaceSub InplaceUpdate
InTopK/V2 Inv/Grad Invert InvertPermutation IRFFT IRFFT2D IRFFT3D IRFFTND IsFinite IsInf IsNan
IsotonicRegression KMC2ChainInitialization KmeansPlusPlusInitialization L2Loss LeakyRelu/Grad
LeftShift Less LessEqual Lgamma LinSpace ListDiff Log Log1p LogicalAnd LogicalNot LogicalOr
LogMatrixDeterminant LogSoftmax LowerBound LRN/Grad LSTMBlockCell/Grad Lu MatMul MatrixBandPart
MatrixDeterminant MatrixDiag/V2/V3 MatrixDiagPart/V2/V3 MatrixExponential MatrixInverse
MatrixLogarithm MatrixSetDiag/V2/V3 MatrixSolve MatrixSolveLs MatrixSquareRoot
MatrixTriangularSolve Max Maximum MaxPool/Grad/GradV2/V2 MaxPool3D/Grad MaxPool3DGradGrad
MaxPoolGradGrad/V2 MaxPoolGradGradWithArgmax MaxPoolGradWithArgmax MaxPoolWithArgmax Mean Min
Minimum MirrorPad/Grad Mod Mul MulNoNan Ndtri NearestNeighbors Neg NextAfter
NonMaxSuppression/V2/V3/V4/V5 NonMaxSuppressionWithOverlaps NotEqual NthElement OneHot OnesLike
Pack Pad/V2 ParallelConcat ParallelDynamicStitch Polygamma PopulationCount Pow PreventGradient
Prod Qr QuantizeV2 QuantizeAndDequantize/V2/V3/V4 QuantizeAndDequantizeV4Grad QuantizedAdd
QuantizedAvgPool QuantizedBatchNormWithGlobalNormalization QuantizedBiasAdd QuantizedConcat/V2
QuantizedConv2D QuantizedConv2DAndRelu QuantizedConv2DAndReluAndRequantize
QuantizedConv2DAndRequantize QuantizedConv2DPerChannel QuantizedConv2DWithBias
QuantizedConv2DWithBiasAndRelu QuantizedConv2DWithBiasAndReluAndRequantize
QuantizedConv2DWithBiasAndRequantize QuantizedConv2DWithBiasSignedSumAndReluAndRequantize
QuantizedConv2DWithBiasSumAndRelu QuantizedConv2DWithBiasSumAndReluAndRequantize
QuantizedDepthwiseConv2D QuantizedDepthwiseConv2DWithBias QuantizedDepthwiseConv2DWithBiasAndRelu
QuantizedDepthwiseConv2DWithBiasAndReluAndRequantize QuantizedInstanceNorm QuantizedMatMul
QuantizedMatMulWithBias QuantizedMatMulWithBiasAndDequantize QuantizedMatMulWithBiasAndRelu
QuantizedMatMulWithBiasAndReluAndRequantize QuantizedMatMulWithBiasAndRequantize QuantizedMaxPool
QuantizedMul QuantizeDownAndShrinkRange QuantizedRelu QuantizedRelu6 QuantizedReshape
QuantizedResizeBilinear RaggedBincount RaggedCountSparseOutput RaggedCross
RaggedFillEmptyRows/Grad RaggedGather RaggedRange RaggedTensorFromVariant RaggedTensorToSparse
RaggedTensorToTensor RaggedTensorToVariant RaggedTensorToVariantGradient Range Rank Real RealDiv
Reciprocal/Grad Relu/Grad Relu6/Grad RequantizationRange RequantizationRangePerChannel Requantize
RequantizePerChannel Reshape ResizeArea ResizeBicubic/Grad ResizeBilinear/Grad
ResizeNearestNeighbor/Grad Reverse/V2 ReverseSequence RFFT RFFT2D RFFT3D RFFTND RGBToHSV
RightShift Rint Roll Round Rsqrt/Grad ScaleAndTranslate/Grad SdcaFprint SdcaOptimizer/V2
SdcaShrinkL1 SegmentMax/V2 SegmentMean SegmentMin/V2 SegmentProd/V2 SegmentSum/V2 Select/V2
SelfAdjointEig/V2 Selu/Grad SetSize Shape ShapeN Sigmoid/Grad Sign Sin Sinh Size Slice Snapshot
SobolSample Softmax SoftmaxCrossEntropyWithLogits Softplus/Grad Softsign/Grad SpaceToBatch
SpaceToBatchND SpaceToDepth SparseAdd/Grad SparseBincount SparseConcat SparseCountSparseOutput
SparseCross/V2 SparseCrossHashed SparseDenseCwiseAdd SparseDenseCwiseDiv SparseDenseCwiseMul
SparseFillEmptyRows/Grad SparseMatMul SparseMatrixAdd SparseMatrixMatMul SparseMatrixMul
SparseMatrixNNZ SparseMatrixOrderingAMD SparseMatrixSoftmax/Grad SparseMatrixSparseCholesky
SparseMatrixSparseMatMul SparseMatrixTranspose SparseMatrixZeros SparseReduceMax
SparseReduceMaxSparse SparseReduceSum SparseReduceSumSparse SparseReorder SparseReshape
SparseSegmentMean/Grad/GradV2 SparseSegmentMeanWithNumSegments SparseSegmentSqrtN/Grad/GradV2
SparseSegmentSqrtNWithNumSegments SparseSegmentSum/Grad/GradV2 SparseSegmentSumWithNumSegments
SparseSlice/Grad SparseSoftmax SparseSoftmaxCrossEntropyWithLogits SparseSparseMaximum
SparseSparseMinimum SparseSplit SparseTensorDenseAdd SparseTensorDenseMatMul
SparseTensorToCSRSparseMatrix SparseToDense SparseToSparseSetOperation Spence Split SplitV
Sqrt/Grad Square SquaredDifference Squeeze StochasticCastToInt StopGradient StridedSlice/Grad Sub
Sum Svd Tan Tanh/Grad TensorListConcat/V2 TensorListConcatLists TensorListElementShape
TensorListFromTensor TensorListGather TensorListGetItem TensorListLength TensorListPopBack
TensorListPushBack TensorListPushBackBatch TensorListReserve TensorListResize TensorListScatter/V2
TensorListScatterIntoExistingList TensorListSetItem TensorListSplit TensorListStack TensorMapErase
TensorMapHasKey TensorMapInsert TensorMapLookup TensorMapSize TensorMapStackKeys TensorScatterAdd
TensorScatterMax TensorScatterMin TensorScatterSub TensorScatterUpdate TensorStridedSliceUpdate
Tile/Grad ToBool TopK/V2 Transpose TridiagonalMatMul TridiagonalSolve TruncateDiv TruncateMod
UniformDequantize UniformQuantize UniformQuantizedAdd UniformQuantizedClipByValue
UniformQuantizedConvolution UniformQuantizedConvolutionHybrid UniformQuantizedDot
UniformQuantizedDotHybrid UniformRequantize Unique/V2 UniqueWithCounts/V2 Unpack UnravelIndex
UnsortedSegmentMax UnsortedSegmentMin UnsortedSegmentProd UnsortedSegmentSum UpperBound Where
WindowOp Xdivy Xlog1py Xlogy ZerosLike Zeta
"""

#: The same for text, and for files that are in memory already.
_TEXT = """
AsString AudioMicrofrontend AudioSpectrogram AudioSummary/V2 DebugNumericSummaryV2
DecodeAndCropJpeg DecodeBase64 DecodeBmp DecodeCompressed DecodeCSV DecodeGif DecodeImage
DecodeJpeg DecodeJSONExample DecodeJxl DecodePaddedRaw DecodePng DecodeRaw DecodeWav DecodeWebP
EncodeBase64 EncodeJpeg EncodeJpegVariableQuality EncodePng EncodeWav ExtractJpegShape Fingerprint
HistogramSummary ImageSummary MergeSummary Mfcc ParseExample/V2 ParseSequenceExample/V2
ParseSingleExample ParseSingleSequenceExample ParseTensor ReduceJoin RegexFullMatch RegexReplace
ScalarSummary SerializeManySparse SerializeSparse SerializeTensor ShardedFilename ShardedFilespec
StaticRegexFullMatch StaticRegexReplace StringFormat StringJoin StringLength StringLower
StringNGrams StringSplit/V2 StringStrip StringToHashBucket StringToHashBucketFast
StringToHashBucketStrong StringToNumber StringUpper Substr TensorSummary/V2 UnicodeDecode
UnicodeDecodeWithOffsets UnicodeEncode UnicodeScript UnicodeTranscode UnsortedSegmentJoin
"""

#: XLA's own mathematics, of jax2tf's older exports.
_XLA = """
XlaBroadcastHelper XlaConv/V2 XlaDot/V2 XlaDynamicSlice XlaDynamicUpdateSlice XlaEinsum XlaGather
XlaKeyValueSort XlaOptimizationBarrier XlaPad XlaReduce XlaReducePrecision XlaReduceWindow
XlaRemoveDynamicDimensionSize XlaReplicaId XlaRngBitGenerator XlaScatter XlaSelectAndScatter
XlaSelfAdjointEig XlaSetBound XlaSetDynamicDimensionSize XlaSharding XlaSort
XlaSpmdShardToFullShape XlaSvd XlaVariadicReduce/V2 XlaVariadicSort
"""

#: They read and change variables, arrays and stacks of the model; optimizers' steps, too.
_VARIABLES = """
AddManySparseToTensorsMap AddSparseToTensorsMap ApplyAdadelta ApplyAdagrad/V2 ApplyAdagradDA
ApplyAdam ApplyAdaMax ApplyAddSign ApplyCenteredRMSProp ApplyFtrl/V2 ApplyGradientDescent
ApplyMomentum ApplyPowerSign ApplyProximalAdagrad ApplyProximalGradientDescent ApplyRMSProp Assign
AssignAdd AssignAddVariableOp AssignSub AssignSubVariableOp AssignVariableOp CountUpTo DeepCopy
DestroyTemporaryVariable DisableCopyOnRead Empty GuaranteeConst IsResourceHandleRefCounting
IsVariableInitialized MakeWeakResourceHandle ReadVariableOp ResourceApplyAdadelta
ResourceApplyAdagrad/V2 ResourceApplyAdagradDA ResourceApplyAdam ResourceApplyAdaMax
ResourceApplyAdamWithAmsgrad ResourceApplyAddSign ResourceApplyCenteredRMSProp
ResourceApplyFtrl/V2 ResourceApplyGradientDescent ResourceApplyKerasMomentum ResourceApplyMomentum
ResourceApplyPowerSign ResourceApplyProximalAdagrad ResourceApplyProximalGradientDescent
ResourceApplyRMSProp ResourceCountUpTo ResourceGather ResourceGatherNd ResourceScatterAdd
ResourceScatterDiv ResourceScatterMax ResourceScatterMin ResourceScatterMul ResourceScatterNdAdd
ResourceScatterNdMax ResourceScatterNdMin ResourceScatterNdSub ResourceScatterNdUpdate
ResourceScatterSub ResourceScatterUpdate ResourceSparseApplyAdadelta ResourceSparseApplyAdagrad/V2
ResourceSparseApplyAdagradDA ResourceSparseApplyCenteredRMSProp ResourceSparseApplyFtrl/V2
ResourceSparseApplyKerasMomentum ResourceSparseApplyMomentum ResourceSparseApplyProximalAdagrad
ResourceSparseApplyProximalGradientDescent ResourceSparseApplyRMSProp ResourceStridedSliceAssign
ScatterAdd ScatterDiv ScatterMax ScatterMin ScatterMul ScatterNd ScatterNdAdd ScatterNdMax
ScatterNdMin ScatterNdNonAliasingAdd ScatterNdSub ScatterNdUpdate ScatterSub ScatterUpdate
SparseApplyAdadelta SparseApplyAdagrad/V2 SparseApplyAdagradDA SparseApplyCenteredRMSProp
SparseApplyFtrl/V2 SparseApplyMomentum SparseApplyProximalAdagrad
SparseApplyProximalGradientDescent SparseApplyRMSProp Stack/V2 StackClose/V2 StackPop/V2
StackPush/V2 StridedSliceAssign TakeManySparseFromTensorsMap TemporaryVariable
TensorArray/Grad/GradV2/GradV3/V2/V3 TensorArrayClose/V2/V3 TensorArrayConcat/V2/V3
TensorArrayGather/V2/V3 TensorArrayGradWithShape TensorArrayPack TensorArrayRead/V2/V3
TensorArrayScatter/V2/V3 TensorArraySize/V2/V3 TensorArraySplit/V2/V3 TensorArrayUnpack
TensorArrayWrite/V2/V3 VarHandleOp Variable/V2 VariableShape VarIsInitializedOp
"""

#: Tables whose content is in the graph or derived from it.
_TABLES = """
AnonymousHashTable AnonymousMutableDenseHashTable AnonymousMutableHashTable
AnonymousMutableHashTableOfTensors HashTable/V2 InitializeTable/V2 InitializeTableFromDataset
LookupTableExport/V2 LookupTableFind/V2 LookupTableImport/V2 LookupTableInsert/V2
LookupTableRemoveV2 LookupTableSize/V2 MutableDenseHashTable/V2 MutableHashTable/V2
MutableHashTableOfTensors/V2
"""

#: Random numbers, of a seed or of the system.
_RANDOM = """
AllCandidateSampler AnonymousRandomSeedGenerator AnonymousSeedGenerator ComputeAccidentalHits
DeleteRandomSeedGenerator DeleteSeedGenerator DummySeedGenerator LearnedUnigramCandidateSampler
LogUniformCandidateSampler Multinomial NonDeterministicInts ParameterizedTruncatedNormal
RandomCrop RandomGamma/Grad RandomIndexShuffle RandomPoisson/V2 RandomShuffle RandomStandardNormal
RandomUniform RandomUniformInt RngReadAndSkip RngSkip SampleDistortedBoundingBox/V2
StatefulRandomBinomial StatefulStandardNormal/V2 StatefulTruncatedNormal StatefulUniform
StatefulUniformFullInt StatefulUniformInt StatelessMultinomial
StatelessParameterizedTruncatedNormal StatelessRandomBinomial StatelessRandomGammaV2
StatelessRandomGammaV3 StatelessRandomGetAlg StatelessRandomGetKeyCounter
StatelessRandomGetKeyCounterAlg StatelessRandomNormal/V2 StatelessRandomPoisson
StatelessRandomUniform/V2 StatelessRandomUniformFullInt/V2 StatelessRandomUniformInt/V2
StatelessSampleDistortedBoundingBox StatelessShuffle StatelessTruncatedNormal/V2
ThreadUnsafeUnigramCandidateSampler TruncatedNormal UniformCandidateSampler
"""

#: Branches, loops, calls of functions, which are looked over themselves; checks; the clock.
_CONTROL = """
Assert Case CheckNumerics/V2 Const ControlTrigger CudnnRNN/V2/V3 CudnnRNNBackprop/V2/V3
DeviceIndex Enter Exit FakeParam For HostConst If IsTensorFloat32Enabled LoopCond MapDefun Merge
NextIteration NoOp PartitionedCall Placeholder/V2 PlaceholderWithDefault Print RefEnter RefExit
RefIdentity RefMerge RefNextIteration RefSelect RefSwitch StatefulPartitionedCall StatelessCase
StatelessIf StatelessWhile Switch SymbolicGradient Timestamp While XlaIf XlaWhile
"""

#: Data in memory, and elementwise operations on it.
_DATASETS = """
AnonymousIterator/V2/V3 AssertCardinalityDataset AssertNextDataset AssertPrevDataset
AutoShardDataset BatchDataset/V2 BytesProducedStatsDataset ChooseFastestBranchDataset
ChooseFastestDataset CompressElement ComputeBatchSize ConcatenateDataset DatasetCardinality
DatasetFingerprint DatasetToGraph/V2 DatasetToSingleElement DeleteIterator
DenseToSparseBatchDataset DirectedInterleaveDataset DummyIterationCounter
ExperimentalAssertNextDataset ExperimentalAutoShardDataset ExperimentalBytesProducedStatsDataset
ExperimentalChooseFastestDataset ExperimentalDatasetCardinality
ExperimentalDenseToSparseBatchDataset ExperimentalDirectedInterleaveDataset
ExperimentalGroupByReducerDataset ExperimentalGroupByWindowDataset ExperimentalIgnoreErrorsDataset
ExperimentalLatencyStatsDataset ExperimentalMapAndBatchDataset
ExperimentalMaxIntraOpParallelismDataset ExperimentalNonSerializableDataset
ExperimentalParallelInterleaveDataset ExperimentalParseExampleDataset
ExperimentalPrivateThreadPoolDataset ExperimentalRandomDataset ExperimentalRebatchDataset
ExperimentalScanDataset ExperimentalSlidingWindowDataset ExperimentalTakeWhileDataset
ExperimentalUnbatchDataset ExperimentalUniqueDataset FilterDataset FinalizeDataset FlatMapDataset
GeneratorDataset GetElementAtIndex GetOptions GlobalShuffleDataset GroupByReducerDataset
GroupByWindowDataset IgnoreErrorsDataset IndexFlatMapDataset InterleaveDataset Iterator/V2
IteratorGetNext IteratorGetNextAsOptional IteratorGetNextSync LatencyStatsDataset
LegacyParallelInterleaveDatasetV2 ListDataset MakeIterator MapAndBatchDataset MapDataset
MaxIntraOpParallelismDataset ModelDataset NonSerializableDataset OneShotIterator
OptimizeDataset/V2 OptionalFromValue OptionalGetValue OptionalHasValue OptionalNone OptionsDataset
PaddedBatchDataset/V2 ParallelBatchDataset ParallelFilterDataset
ParallelInterleaveDataset/V2/V3/V4 ParallelMapDataset/V2 ParseExampleDataset/V2 PrefetchDataset
PrivateThreadPoolDataset RandomDataset/V2 RangeDataset RebatchDataset/V2 ReduceDataset
RepeatDataset RewriteDataset SamplingDataset ScanDataset ShardDataset ShuffleAndRepeatDataset/V2
ShuffleDataset/V2/V3 SkipDataset SlidingWindowDataset SparseTensorSliceDataset TakeDataset
TakeWhileDataset TensorDataset TensorSliceDataset UnbatchDataset UncompressElement UniqueDataset
UnwrapDatasetVariant WeightedFlatMapDataset WindowDataset WrapDatasetVariant ZipDataset
"""

#: Stateless operations with a CPU kernel that are refused, by reason.
_REFUSED = {
    "read or write a file whose name is an input or an attribute": """
        CacheDataset GenerateVocabRemapping ImmutableConst MatchingFiles ReadFile
        ReaderNumRecordsProduced ReaderNumWorkUnitsCompleted ReaderRead ReaderReadUpTo
        ReaderReset ReaderRestoreState ReaderSerializeState SnapshotChunkDataset
        SnapshotDataset/V2 SnapshotDatasetReader SnapshotNestedDatasetReader
    """,
    "talk to an address, of a debugger or another process": """
        Copy CopyHost DebugIdentity DebugNanCount DebugNumericSummary RegisterDataset/V2
    """,
    "end the process, call Python, or run a graph that is the bytes of a constant": """
        Abort DatasetFromGraph PyFuncStateless XlaLaunchV2
    """,
    "block until something else happens, which may be never": """
        AccumulatorApplyGradient AccumulatorNumAccumulated AccumulatorSetGlobalStep
        AccumulatorTakeGradient BarrierClose BarrierIncompleteSize BarrierInsertMany
        BarrierReadySize BarrierTakeMany Batch BatchFunction ExperimentalSleepDataset
        GetDeadline QueueClose QueueDequeue QueueDequeueMany QueueDequeueUpTo QueueEnqueue
        QueueEnqueueMany QueueIsClosed QueueSize SleepDataset
        SparseAccumulatorApplyGradient SparseAccumulatorTakeGradient Unbatch/Grad
    """,
    "keep values apart from the model, for a converter": """
        CustomAggregator TfLiteSubgraphExecute
    """,
    "are there for TensorFlow's tests": """
        CheckPinned ConstructionFails Fact KernelLabel KernelLabelRequired Old
    """,
}

#: Where a program may print: no other process reads it as data.
_STREAMS = (b"stderr", b"stdout", b"log(info)", b"log(warning)", b"log(error)")


class Attribute(NamedTuple):
    """An attribute that may name a file, and its values that do not."""

    name: str
    texts: tuple[bytes, ...]
    beginnings: tuple[bytes, ...] = ()

    def names_no_file(self, text: bytes) -> bool:
        return text in self.texts or text.startswith(self.beginnings)


_DESCRIPTORS = Attribute("descriptor_source", (b"", b"local://"), (b"bytes://",))
#: Allowed unless an attribute names a file; without the attribute they touch none.
BY_ATTRIBUTE = {
    "DecodeProtoV2": _DESCRIPTORS,
    "EncodeProto": _DESCRIPTORS,
    "FixedUnigramCandidateSampler": Attribute("vocab_file", (b"",)),
    "PrintV2": Attribute("output_stream", _STREAMS),
}
#: Allowed if their StableHLO programs call only allowed functions.
MODULES = frozenset(("XlaCallModule",))

#: They read a vocabulary; the number of the input that is the name of its file.
TABLE_FILES = {"InitializeTableFromTextFile": (1,), "InitializeTableFromTextFileV2": (1,)}
#: They read and write a checkpoint; the numbers of the inputs that are names of its files.
CHECKPOINTS = {"SaveV2": (0,), "RestoreV2": (0,), "MergeV2Checkpoints": (0, 1)}


def _names(text: str) -> list[str]:
    """The names that a text abbreviates.

    Example:
        >>> _names("Relu/Grad Add/V2")
        ['Relu', 'ReluGrad', 'Add', 'AddV2']
    """
    found = []
    for word in text.split():
        name, *rest = word.split("/")
        found += [name, *(name + each for each in rest)]
    return found


#: With any operands, at any place.
ALLOWED = frozenset(
    _names(" ".join((_MATHEMATICS, _TEXT, _XLA, _VARIABLES, _TABLES, _RANDOM, _CONTROL, _DATASETS)))
)
#: The reason for each.
REFUSED = {name: reason for reason, text in _REFUSED.items() for name in _names(text)}
#: Allowed, or looked at more closely.
KNOWN = ALLOWED | MODULES | BY_ATTRIBUTE.keys() | TABLE_FILES.keys() | CHECKPOINTS.keys()
