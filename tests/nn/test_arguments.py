"""Messages that several layers share, word for word."""

import pytest

import pax_export as pax

MESSAGES = {
    """\
This argument must be one of a few words.
  where: Conv2D.data_format
  got: 'NCWH'
  write: 'NHWC' or 'NCHW'""": lambda: pax.Conv2D(1, 1, 3, data_format="NCWH"),
    """\
This argument needs one integer for each of 2 spatial axes.
  where: Conv2D.stride
  got: (1, 2, 3)
  write: an integer, or a sequence of 2""": lambda: pax.Conv2D(1, 1, 3, stride=(1, 2, 3)),
    """\
This argument must be at least 1.
  where: Conv1D.kernel_shape
  got: 0
  write: an integer of at least 1""": lambda: pax.Conv1D(1, 1, 0),
    """\
The padding needs a pair (before, after) for each of 2 spatial axes.
  where: Conv2DTranspose.padding
  got: [1, 2]
  write: 'SAME', 'VALID' or [(1, 1), (1, 1)]""": lambda: pax.Conv2DTranspose(
        1, 1, 3, padding=[1, 2]
    ),
    """\
The padding of a convolution must be a word or a list of pairs.
  where: Conv1D.padding
  got: a tuple, ((1, 1),)
  write: 'SAME', 'VALID' or a list such as [(1, 1)]""": lambda: pax.Conv1D(
        1, 1, 3, padding=((1, 1),)
    ),
    """\
Input and output features must be divisible by the number of groups.
  where: Conv2D.feature_group_count
  got: 2 groups for 4 -> 3 features
  write: a common divisor of both""": lambda: pax.Conv2D(4, 3, 3, feature_group_count=2),
    """\
The channel axis is out of range.
  where: max_pool.channel_axis
  got: 2 for shape (1, 1)
  write: an axis of the input, or None if there are no channels""": lambda: pax.max_pool(
        [[1.0]], (1,), (1,), "SAME", 2
    ),
    """\
The window has more sizes than the input has axes.
  where: avg_pool.strides
  got: (1, 1, 1) for shape (1, 1)
  write: at most 2 integers""": lambda: pax.avg_pool([[1.0]], (1,), (1, 1, 1), "SAME"),
    """\
The input must have the form [batch, ..., channels].
  where: GroupNorm(groups=1, num_channels=1, axis=slice(1, None, None), create_scale=True, \
create_offset=True, data_format=channels_last)
  got: shape ()""": lambda: pax.GroupNorm(1, 1)(1.0),
}


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message.split("\n")[1].strip())
def test_message(message):
    with pytest.raises(ValueError) as error:
        MESSAGES[message]()
    assert str(error.value) == message
    assert isinstance(error.value, AssertionError)
