// What a card calls of onnxruntime, and where it stands in the table of functions, which only
// ever grows at its end.  Wheels of onnxruntime have the library and no headers.
#include <stddef.h>
#include <stdint.h>

#define ORT_API_VERSION 13

typedef struct OrtEnv OrtEnv;
typedef struct OrtStatus OrtStatus;
typedef struct OrtMemoryInfo OrtMemoryInfo;
typedef struct OrtSession OrtSession;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtRunOptions OrtRunOptions;
typedef struct OrtValue OrtValue;

typedef enum { ORT_LOGGING_LEVEL_WARNING = 2 } OrtLoggingLevel;
typedef enum { OrtArenaAllocator = 1 } OrtAllocatorType;
typedef enum { OrtMemTypeDefault = 0 } OrtMemType;
typedef enum {
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT = 1,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT8 = 2,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8 = 3,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT16 = 4,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT16 = 5,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32 = 6,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64 = 7,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_BOOL = 9,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16 = 10,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE = 11,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT32 = 12,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_UINT64 = 13,
  ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16 = 16
} ONNXTensorElementDataType;

#define STATUS __attribute__((warn_unused_result)) OrtStatus*

typedef struct {
  void* before_2[2];
  const char* (*GetErrorMessage)(const OrtStatus* status);
  STATUS (*CreateEnv)(OrtLoggingLevel level, const char* log, OrtEnv** made);
  void* before_7[3];
  STATUS (*CreateSession)(
      const OrtEnv* env, const char* path, const OrtSessionOptions* options, OrtSession** made);
  void* before_9[1];
  STATUS (*Run)(OrtSession* session, const OrtRunOptions* options, const char* const* names,
                const OrtValue* const* inputs, size_t count, const char* const* wanted,
                size_t wanted_count, OrtValue** outputs);
  STATUS (*CreateSessionOptions)(OrtSessionOptions** made);
  void* before_49[38];
  STATUS (*CreateTensorWithDataAsOrtValue)(
      const OrtMemoryInfo* memory, void* data, size_t bytes, const int64_t* shape, size_t rank,
      ONNXTensorElementDataType type, OrtValue** made);
  void* before_51[1];
  STATUS (*GetTensorMutableData)(OrtValue* value, void** data);
  void* before_69[17];
  STATUS (*CreateCpuMemoryInfo)(OrtAllocatorType kind, OrtMemType type, OrtMemoryInfo** made);
} OrtApi;

typedef struct {
  const OrtApi* (*GetApi)(uint32_t version);
  const char* (*GetVersionString)(void);
} OrtApiBase;

const OrtApiBase* OrtGetApiBase(void);
