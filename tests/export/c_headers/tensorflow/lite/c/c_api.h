// What a card calls of LiteRT's interpreter; no package that pip installs has its headers.
#ifndef CARDS_C_API_H_
#define CARDS_C_API_H_
#include <stddef.h>
#include <stdint.h>

typedef enum { kTfLiteOk = 0, kTfLiteError = 1 } TfLiteStatus;
typedef struct TfLiteModel TfLiteModel;
typedef struct TfLiteInterpreter TfLiteInterpreter;
typedef struct TfLiteInterpreterOptions TfLiteInterpreterOptions;
typedef struct TfLiteTensor TfLiteTensor;

TfLiteModel* TfLiteModelCreateFromFile(const char* path);
TfLiteInterpreter* TfLiteInterpreterCreate(
    const TfLiteModel* model, const TfLiteInterpreterOptions* options);
void* TfLiteTensorData(const TfLiteTensor* tensor);
size_t TfLiteTensorByteSize(const TfLiteTensor* tensor);
#endif
