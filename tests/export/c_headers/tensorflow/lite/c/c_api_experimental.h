// What a card calls of the runners of signatures; later releases have them in c_api.h.
#include "tensorflow/lite/c/c_api.h"

typedef struct TfLiteSignatureRunner TfLiteSignatureRunner;

TfLiteSignatureRunner* TfLiteInterpreterGetSignatureRunner(
    const TfLiteInterpreter* interpreter, const char* key);
TfLiteStatus TfLiteSignatureRunnerResizeInputTensor(
    TfLiteSignatureRunner* runner, const char* name, const int* sizes, int32_t rank);
TfLiteStatus TfLiteSignatureRunnerAllocateTensors(TfLiteSignatureRunner* runner);
TfLiteTensor* TfLiteSignatureRunnerGetInputTensor(
    TfLiteSignatureRunner* runner, const char* name);
TfLiteStatus TfLiteSignatureRunnerInvoke(TfLiteSignatureRunner* runner);
const TfLiteTensor* TfLiteSignatureRunnerGetOutputTensor(
    const TfLiteSignatureRunner* runner, const char* name);
