"""Coefficients of the series by which functions are computed where a format has none of them."""

from __future__ import annotations

#: Giles, "Approximating the erfinv function", of w = -log(1 - x*x): below 5 in w - 2.5.
ERF_INV_CENTRAL = (
    *(2.81022636e-08, 3.43273939e-07, -3.5233877e-06, -4.39150654e-06, 0.00021858087),
    *(-0.00125372503, -0.00417768164, 0.246640727, 1.50140941),
)
#: Beyond that in sqrt(w) - 3.
ERF_INV_TAIL = (
    *(-0.000200214257, 0.000100950558, 0.00134934322, -0.00367342844, 0.00573950773),
    *(-0.0076224613, 0.00943887047, 1.00167406, 2.83297682),
)
#: Lanczos' series of the gamma function, with g = 7, after a constant that is nearly 1.
LANCZOS = (
    *(676.520368121885098567009190444019, -1259.13921672240287047156078755283),
    *(771.3234287776530788486528258894, -176.61502916214059906584551354),
    *(12.507343278686904814458936853, -0.13857109526572011689554707),
    *(9.984369578019570859563e-6, 1.50563273514931155834e-7),
)
