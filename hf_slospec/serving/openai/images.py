"""Images in messages: decoded from data URLs, never fetched."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Callable
from typing import Any

from hf_slospec.errors import InvalidInputError

PREFIX, ENCODING = "data:image/", ";base64,"


def check_data_url(url: str) -> str:
    """Return the URL of an image, or raise ValueError unless it holds the image itself, in base64."""
    head, comma, _ = url.partition(",")
    if not url.startswith(PREFIX) or head + comma != head.removesuffix(ENCODING[:-1]) + ENCODING:
        raise ValueError(
            f"must be a data URL, {PREFIX}png{ENCODING}...; images are not fetched from elsewhere, got {url[:40]!r}"
        )
    return url


class ImageBudget:
    """Decodes the images of one request, up to a number of pixels: a small file may hold far more than its bytes."""

    def __init__(self, take: Callable[[int], None]):
        """``take`` is called with the pixels of all images so far before one is decoded, and may raise."""
        self._take, self._num_pixels = take, 0

    def decoded(self, url: str) -> Any:
        """Return the image of a data URL as a PIL image in RGB.

        Raises:
            InvalidInputError: it is no image, or has too many pixels; Pillow is missing.
        """
        try:
            from PIL import Image, UnidentifiedImageError
        except ImportError as error:
            raise InvalidInputError("image_url needs Pillow here: pip install pillow") from error
        try:
            content = base64.b64decode(url.partition(",")[2], validate=True)
        except binascii.Error as error:
            raise InvalidInputError(f"image_url.url is no valid base64: {error}") from error
        try:
            image = Image.open(io.BytesIO(content))
            self._num_pixels += image.width * image.height
            self._take(self._num_pixels)
            return image.convert("RGB")
        except (UnidentifiedImageError, Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
            if isinstance(error, InvalidInputError):
                raise
            raise InvalidInputError(f"image_url.url cannot be read as an image: {error}") from error
