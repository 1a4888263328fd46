/* Chats by token ids with an exported language model: TensorFlow's C library is all it needs.
 *
 *     chat MODEL STOP [MOST]
 *
 * Each line of standard input is a turn: ids of tokens.  The answer to it is printed id by id, as
 * it comes, up to the id STOP (-1: none) or MOST ids.  MODEL is what pax.generation.export wrote;
 * its cache goes out of one call and into the next, so earlier turns are never read again. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <tensorflow/c/c_api.h>

enum { PARTS = 1 << 12, IDS = 1 << 16, ROOM = 2048 };
static TF_Status *status;
static TF_Graph *graph;
static TF_Session *session;
static const char *names[PARTS]; /* of the parts of the cache, sorted, as outputs are */
static TF_Tensor *cache[PARTS];
static int parts, room, lengths = -1; /* tokens that it has room for; its part that counts them */

static void fail(const char *what, const char *why) {
    fprintf(stderr, "chat: %s: %s\n", what, why);
    exit(1);
}

static void check(const char *what) {
    if (TF_GetCode(status) != TF_OK) fail(what, TF_Message(status));
}

static TF_Output operation(const char *signature, const char *name, int index) {
    char whole[256];
    snprintf(whole, sizeof whole, "%s%s", signature, name);
    TF_Output output = {TF_GraphOperationByName(graph, whole), index};
    if (!output.oper) fail(whole, "the model has no such operation");
    return output;
}

static TF_Tensor *integers(const int *ids, int rank, int count) {
    int64_t shape[] = {1, count};
    TF_Tensor *tensor = TF_AllocateTensor(TF_INT32, shape, rank, count * sizeof *ids);
    memcpy(TF_TensorData(tensor), ids, count * sizeof *ids);
    return tensor;
}

static int by_name(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* An empty cache: zeros, of one row and of ROOM tokens where the model takes any number of them. */
static void make_cache(void) {
    const char *begin = "decode_cache.";
    TF_Operation *each;
    for (size_t at = 0; (each = TF_GraphNextOperation(graph, &at));) {
        if (strncmp(TF_OperationName(each), begin, strlen(begin))) continue;
        if (parts == PARTS) fail("the model", "its cache has too many parts");
        names[parts++] = TF_OperationName(each) + strlen("decode_");
    }
    if (!parts) fail("the model", "it has no cache; export it with pax.generation.export");
    qsort(names, parts, sizeof *names, by_name);
    int64_t rows;
    TF_GraphGetTensorShape(graph, operation("decode_", "token", 0), &rows, 1, status);
    for (int i = 0; i < parts; i++) {
        TF_Output input = operation("decode_", names[i], 0);
        int rank = TF_GraphGetTensorNumDims(graph, input, status);
        int64_t shape[8], count = 1;
        TF_DataType type = TF_OperationOutputType(input);
        TF_GraphGetTensorShape(graph, input, shape, rank < 8 ? rank : 8, status);
        check(names[i]);
        for (int axis = 0, any = rows >= 0; axis < rank; count *= shape[axis++])
            if (shape[axis] < 0) shape[axis] = any++ ? ROOM : 1;
        if (!strcmp(names[i], "cache.lengths")) lengths = i;
        if (!i && rank > 3 && !strncmp(names[i], "cache.keys", 10)) room = shape[rank - 3];
        cache[i] = TF_AllocateTensor(type, shape, rank, count * TF_DataTypeSize(type));
        memset(TF_TensorData(cache[i]), 0, TF_TensorByteSize(cache[i]));
    }
}

/* Reads ids into the cache; gives the likeliest id after them. */
static int read_ids(const char *signature, const char *call, const int *ids, int count) {
    TF_Output inputs[PARTS + 2], outputs[PARTS + 1];
    TF_Tensor *given[PARTS + 2], *found[PARTS + 1];
    int whole = !strcmp(signature, "prefill_"), taken = parts;
    int held = lengths < 0 || !room ? -count : *(const int *)TF_TensorData(cache[lengths]);
    if (held + count > room)
        fprintf(stderr, "chat: the cache is full: %d tokens are in it and %d come, where %d have room; "
                "export with a larger max_length, or begin anew\n", held, count, room), exit(1);
    for (int i = 0; i <= parts; i++) outputs[i] = operation("", call, i); /* the last is logits */
    for (int i = 0; i < parts; i++) inputs[i] = operation(signature, names[i], 0), given[i] = cache[i];
    inputs[taken] = operation(signature, whole ? "tokens" : "token", 0);
    given[taken++] = integers(ids, whole ? 2 : 1, count);
    if (whole) inputs[taken] = operation(signature, "lengths", 0), given[taken++] = integers(&count, 1, 1);
    TF_SessionRun(session, NULL, inputs, given, taken, outputs, found, parts + 1, NULL, 0, NULL, status);
    check("the model");
    for (int i = 0; i < taken; i++) TF_DeleteTensor(given[i]);
    memcpy(cache, found, parts * sizeof *cache);
    const float *logits = TF_TensorData(found[parts]);
    int size = TF_TensorByteSize(found[parts]) / sizeof *logits, best = 0;
    for (int i = 1; i < size; i++)
        if (logits[i] > logits[best]) best = i;
    TF_DeleteTensor(found[parts]);
    return best;
}

int main(int argc, char **argv) {
    int stop = argc > 2 ? atoi(argv[2]) : 0, most = argc > 3 ? atoi(argv[3]) : 256, kept = 0;
    if (argc < 3 || argc > 4 || most < 1) return fprintf(stderr, "usage: chat MODEL STOP [MOST]\n"), 2;
    static char line[8 * IDS];
    static int ids[IDS];
    const char *tag = "serve";
    status = TF_NewStatus(), graph = TF_NewGraph();
    session = TF_LoadSessionFromSavedModel(TF_NewSessionOptions(), NULL, argv[1], &tag, 1, graph, NULL, status);
    check(argv[1]);
    make_cache();
    while (fgets(line, sizeof line, stdin)) {
        int count = kept; /* the last id of the answer before, which the model has not read yet */
        char *rest = line, *end;
        for (long id; id = strtol(rest, &end, 10), end != rest && count < IDS; rest = end) ids[count++] = id;
        if (rest[strspn(rest, " \n")]) fail(rest, "this is no token id");
        if (count == kept) continue;
        int token = read_ids("prefill_", "StatefulPartitionedCall", ids, count);
        for (int made = 1; printf("%d ", token), fflush(stdout), token != stop && made < most; made++)
            token = read_ids("decode_", "StatefulPartitionedCall_1", &token, 1);
        printf("\n"), ids[0] = token, kept = 1;
    }
}
