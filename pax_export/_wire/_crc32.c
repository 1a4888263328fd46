/* CRC-32, as zlib computes it, and CRC-32C, at the speed at which memory is read.

   Processors of the x86 family multiply polynomials without carries.  A number of 128 bits that
   stands D bits before others is, modulo the polynomial P of the checksum, the sum of its two
   halves multiplied by what x^(D+32) and x^(D-32) are modulo P, so a long message is folded into
   ever fewer bits: 64 bytes at a time, then 16, and the last 16 bytes and the rest go byte by
   byte.  Bits are reflected, as both checksums want them.

   On any other processor, or without a compiler that knows the instructions, `fast` is False
   and zlib computes CRC-32 (see checksums.py).  Only the stable interface of Python is used. */

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#define HAS_FOLDING 1
#include <immintrin.h>
#endif

/* A checksum: P, and x^(512-32), x^(512+32), x^(128-32), x^(128+32) modulo P, all reflected. */
typedef struct {
    uint32_t polynomial;
    int64_t far[2], near[2];
    uint32_t table[256];
} Checksum;

static Checksum zip = {
    0xEDB88320u, {0x1C6E41596, 0x154442BD4}, {0x0CCAA009E, 0x1751997D0}, {0}};
static Checksum castagnoli = {
    0x82F63B78u, {0x09E4ADDF8, 0x0740EEF02}, {0x14CD00BD6, 0x0F20C0DFE}, {0}};

static void
fill_table(Checksum *sum)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        uint32_t rest = byte;
        for (int bit = 0; bit < 8; bit++)
            rest = rest & 1 ? rest >> 1 ^ sum->polynomial : rest >> 1;
        sum->table[byte] = rest;
    }
}

/* The register after some more bytes. */
static uint32_t
by_bytes(const Checksum *sum, uint32_t rest, const uint8_t *at, size_t size)
{
    while (size--)
        rest = rest >> 8 ^ sum->table[(rest ^ *at++) & 255];
    return rest;
}

#ifdef HAS_FOLDING
#define FOLDS __attribute__((target("pclmul,sse2")))

FOLDS static inline __m128i
load(const uint8_t *at)
{
    return _mm_loadu_si128((const __m128i *)at);
}

FOLDS static inline __m128i
folded(__m128i part, __m128i factors, __m128i next)
{
    __m128i low = _mm_clmulepi64_si128(part, factors, 0x00);
    __m128i high = _mm_clmulepi64_si128(part, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

/* The register after some more bytes, at least 64. */
FOLDS static uint32_t
by_folding(const Checksum *sum, uint32_t rest, const uint8_t *at, size_t size)
{
    const __m128i far = _mm_set_epi64x(sum->far[0], sum->far[1]);
    const __m128i near = _mm_set_epi64x(sum->near[0], sum->near[1]);
    __m128i a = _mm_xor_si128(load(at), _mm_cvtsi32_si128((int)rest));
    __m128i b = load(at + 16), c = load(at + 32), d = load(at + 48);
    uint8_t last[16];
    for (at += 64, size -= 64; size >= 64; at += 64, size -= 64) {
        a = folded(a, far, load(at));
        b = folded(b, far, load(at + 16));
        c = folded(c, far, load(at + 32));
        d = folded(d, far, load(at + 48));
    }
    a = folded(folded(folded(a, near, b), near, c), near, d);
    for (; size >= 16; at += 16, size -= 16)
        a = folded(a, near, load(at));
    _mm_storeu_si128((__m128i *)last, a);
    return by_bytes(sum, by_bytes(sum, 0, last, 16), at, size);
}
#endif

static int
folds_here(void)
{
#ifdef HAS_FOLDING
    __builtin_cpu_init();
    return __builtin_cpu_supports("pclmul") && __builtin_cpu_supports("sse2");
#else
    return 0;
#endif
}

static int fast;

/* The checksum of the data behind that of which value is the checksum. */
static PyObject *
checksum(const Checksum *sum, PyObject *arguments)
{
    Py_buffer view;
    unsigned int value = 0;
    if (!PyArg_ParseTuple(arguments, "y*|I", &view, &value))
        return NULL;
    uint32_t rest = ~(uint32_t)value;
    Py_BEGIN_ALLOW_THREADS
#ifdef HAS_FOLDING
    if (fast && view.len >= 64)
        rest = by_folding(sum, rest, view.buf, (size_t)view.len);
    else
#endif
        rest = by_bytes(sum, rest, view.buf, (size_t)view.len);
    Py_END_ALLOW_THREADS
    PyBuffer_Release(&view);
    return PyLong_FromUnsignedLong((uint32_t)~rest);
}

/* crc32(data, value=0) and crc32c(data, value=0) */
static PyObject *
crc32(PyObject *module, PyObject *arguments)
{
    return checksum(&zip, arguments);
}

static PyObject *
crc32c(PyObject *module, PyObject *arguments)
{
    return checksum(&castagnoli, arguments);
}

static PyMethodDef methods[] = {
    {"crc32", crc32, METH_VARARGS, NULL},
    {"crc32c", crc32c, METH_VARARGS, NULL},
    {NULL, NULL, 0, NULL}};

static int
prepare(PyObject *module)
{
    fill_table(&zip);
    fill_table(&castagnoli);
    fast = folds_here();
    return PyModule_AddObjectRef(module, "fast", fast ? Py_True : Py_False);
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, (void *)prepare},
#ifdef Py_GIL_DISABLED
    {Py_mod_gil, Py_MOD_GIL_NOT_USED},
#endif
    {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, .m_name = "_crc32", .m_methods = methods, .m_slots = slots};

PyMODINIT_FUNC
PyInit__crc32(void)
{
    return PyModuleDef_Init(&definition);
}
