"""Images in messages: decoded from data URLs, never fetched."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable
from typing import Any

from hf_slospec.errors import InvalidInputError

PREFIX = "data:image/"
ENCODING = ";base64,"


def check_data_url(url: str) -> str:
    """Return the URL of an image, or raise ValueError unless it holds the image itself, in base64."""
    head, comma, _ = url.partition(",")
    if not url.startswith(PREFIX) or head + comma != head.removesuffix(ENCODING[:-1]) + ENCODING:
        raise ValueError(
            f"must be a data URL, {PREFIX}png{ENCODING}...; images are not fetched from elsewhere, got {url[:40]!r}"
        )
    return url


class ImageBudget:
    """Decodes the images of one request within a limit of pixels: a small file may decompress to
    gigabytes.
    """

    def __init__(self, take: Callable[[int], None]):
        """``take`` gets the number of pixels of all images so far before each is decoded; it raises
        above the limit.
        """
        self._take = take
        self._num_pixels = 0

    def decoded(self, url: str) -> Any:
        """Return the image of a data URL as a PIL image in RGB.

        Raises:
            InvalidInputError: the URL holds no image, the image has too many pixels, or Pillow is
                missing.
        """
        try:
            from PIL import Image, UnidentifiedImageError
        except ImportError as error:
            raise InvalidInputError("image_url needs Pillow here: pip install pillow") from error
        try:
            content = base64.b64decode(url.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise InvalidInputError(
                f"image_url.url is no valid base64: {error}; encode the image file anew"
            ) from error
        try:
            image = Image.open(io.BytesIO(content))
            self._num_pixels += image.width * image.height
            self._take(self._num_pixels)
            return image.convert("RGB")
        except (
            UnidentifiedImageError,
            Image.DecompressionBombError,
            OSError,
            ValueError,
            SyntaxError,
        ) as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(
                f"image_url.url cannot be read as an image: {error}; send a format that Pillow reads, such as PNG"
            ) from error
