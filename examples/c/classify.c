/* Classifies an image with an exported model: TensorFlow's C library is all it needs.
 *
 *     classify MODEL IMAGE.pgm [INPUT OUTPUT]
 *
 * The image is a grey one (PGM, P2 or P5, values up to 255).  INPUT and OUTPUT are operations of
 * the graph, as `saved_model_cli show --dir MODEL --all` names them (without ":0").
 * Prints the logits, then the class. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tensorflow/c/c_api.h>

static void fail(const char *what, const char *why) {
    fprintf(stderr, "classify: %s: %s\n", what, why);
    exit(1);
}

static void check(TF_Status *status, const char *what) {
    if (TF_GetCode(status) != TF_OK) fail(what, TF_Message(status));
}

/* The next number of a PGM file; comments begin with '#'. */
static int number(FILE *file, const char *path) {
    int value, next;
    while ((next = fgetc(file)) == '#' || isspace(next))
        if (next == '#')
            while ((next = fgetc(file)) != '\n' && next != EOF) {}
    ungetc(next, file);
    if (fscanf(file, "%d", &value) != 1) fail(path, "this is no PGM image, or it is cut off");
    return value;
}

/* An image as a tensor [1, height, width, 1] of numbers from 0 to 1. */
static TF_Tensor *read_image(const char *path) {
    FILE *file = fopen(path, "rb");
    if (!file) fail(path, "cannot be opened");
    char kind[3] = "";
    if (fscanf(file, "%2s", kind) != 1 || (strcmp(kind, "P2") && strcmp(kind, "P5")))
        fail(path, "this is no PGM image");
    int width = number(file, path), height = number(file, path), most = number(file, path);
    if (width < 1 || height < 1 || width > 1 << 14 || height > 1 << 14 || most < 1 || most > 255)
        fail(path, "an image of this size or depth cannot be read");
    if (!strcmp(kind, "P5")) fgetc(file); /* the one space before the bytes */
    int64_t shape[] = {1, height, width, 1};
    size_t count = (size_t)width * height;
    TF_Tensor *image = TF_AllocateTensor(TF_FLOAT, shape, 4, count * sizeof(float));
    float *pixels = TF_TensorData(image);
    for (size_t i = 0; i < count; i++) {
        int value = strcmp(kind, "P5") ? number(file, path) : fgetc(file);
        if (value == EOF) fail(path, "the image is cut off");
        pixels[i] = (float)value / most;
    }
    fclose(file);
    return image;
}

static TF_Output operation(TF_Graph *graph, const char *name) {
    TF_Output output = {TF_GraphOperationByName(graph, name), 0};
    if (!output.oper) fail(name, "the model has no such operation");
    return output;
}

int main(int argc, char **argv) {
    if (argc != 3 && argc != 5) {
        fprintf(stderr, "usage: classify MODEL IMAGE.pgm [INPUT OUTPUT]\n");
        return 2;
    }
    TF_Status *status = TF_NewStatus();
    TF_Graph *graph = TF_NewGraph();
    TF_SessionOptions *options = TF_NewSessionOptions();
    const char *tags[] = {"serve"};
    TF_Session *session =
        TF_LoadSessionFromSavedModel(options, NULL, argv[1], tags, 1, graph, NULL, status);
    check(status, argv[1]);

    TF_Output input = operation(graph, argc == 5 ? argv[3] : "serving_default_images");
    TF_Output output = operation(graph, argc == 5 ? argv[4] : "StatefulPartitionedCall");
    TF_Tensor *image = read_image(argv[2]), *logits = NULL;
    TF_SessionRun(session, NULL, &input, &image, 1, &output, &logits, 1, NULL, 0, NULL, status);
    check(status, "the model");
    if (TF_TensorType(logits) != TF_FLOAT) fail("the model", "its output is not float32");

    const float *values = TF_TensorData(logits);
    size_t count = TF_TensorByteSize(logits) / sizeof(float), best = 0;
    for (size_t i = 0; i < count; i++) {
        printf("%.6f%c", values[i], i + 1 < count ? ' ' : '\n');
        if (values[i] > values[best]) best = i;
    }
    printf("class %zu\n", best);
    TF_DeleteTensor(image);
    TF_DeleteTensor(logits);
    TF_CloseSession(session, status);
    TF_DeleteSession(session, status);
    TF_DeleteGraph(graph);
    TF_DeleteSessionOptions(options);
    TF_DeleteStatus(status);
    return 0;
}
