/** Makes square pictures of photos and of the camera, and pixels of pictures. */

/** Width and height of the pictures that are kept. */
export const SIDE = 224;
// Browsers need four bytes per pixel of a photo: phones give up beyond this.
const MAX_PIXELS = 64e6;
const QUALITY = 0.9;

/** Cuts the square in the middle out of a picture. */
function square(source: CanvasImageSource, width: number, height: number, size: number): HTMLCanvasElement {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = size;
  const context = canvas.getContext("2d", { willReadFrequently: true })!;
  // Behind transparent pictures.
  context.fillStyle = "white";
  context.fillRect(0, 0, size, size);
  context.imageSmoothingQuality = "high";
  const side = Math.min(width, height);
  context.drawImage(source, (width - side) / 2, (height - side) / 2, side, side, 0, 0, size, size);
  return canvas;
}

/** Opens a picture; the message of the error follows its name. */
async function opened(blob: Blob): Promise<HTMLImageElement> {
  const image = new Image();
  image.src = URL.createObjectURL(blob);
  try {
    await new Promise((resolve, reject) => {
      image.onload = resolve;
      image.onerror = reject;
    }).catch(() => {
      throw new Error(blob.size ? "isn't an image that this browser can read" : "is empty");
    });
    const { naturalWidth: width, naturalHeight: height } = image;
    if (!width || !height) throw new Error("has no size");
    if (width * height > MAX_PIXELS)
      throw new Error(`has ${width} x ${height} pixels; the maximum is ${MAX_PIXELS / 1e6} million`);
    // Browsers may find only now that a file is damaged.
    await image.decode().catch(() => {
      throw new Error("is damaged");
    });
    return image;
  } finally {
    URL.revokeObjectURL(image.src);
  }
}

async function encoded(canvas: HTMLCanvasElement): Promise<Uint8Array> {
  const blob = await new Promise<Blob | null>((resolve) => canvas.toBlob(resolve, "image/jpeg", QUALITY));
  if (!blob) throw new Error("is too large for this browser's memory");
  return new Uint8Array(await blob.arrayBuffer());
}

/** Returns a photo as a square JPEG picture, upright; the message of an error follows the photo's name. */
export async function pictureOf(photo: Blob): Promise<Uint8Array> {
  const image = await opened(photo);
  return encoded(square(image, image.naturalWidth, image.naturalHeight, SIDE));
}

/** Returns what the camera sees as a square JPEG picture. */
export const snapshot = (video: HTMLVideoElement): Promise<Uint8Array> =>
  encoded(square(video, video.videoWidth, video.videoHeight, SIDE));

export const blobOf = (picture: Uint8Array): Blob =>
  new Blob([picture as Uint8Array<ArrayBuffer>], { type: "image/jpeg" });

/** Returns the pixels of a canvas: red, then green, then blue, each 0 to 1. */
function values(canvas: HTMLCanvasElement): Float32Array {
  const { width, height } = canvas;
  const { data } = canvas.getContext("2d")!.getImageData(0, 0, width, height);
  const count = width * height;
  return Float32Array.from({ length: 3 * count }, (_, i) => data[4 * (i % count) + Math.floor(i / count)]! / 255);
}

/** Returns the pixels of a picture, [3, size, size], of 0 to 1. */
export async function pixelsOf(picture: Uint8Array, size: number): Promise<Float32Array> {
  const image = await opened(blobOf(picture));
  // In full first: browsers may decode a JPEG at a smaller size, which gives other pixels than those of the camera.
  const whole = square(image, image.naturalWidth, image.naturalHeight, SIDE);
  return values(square(whole, SIDE, SIDE, size));
}

/** Returns the pixels of what the camera sees; by way of a picture of the size of those that are kept, as theirs are. */
export function pixelsOfVideo(video: HTMLVideoElement, size: number): Float32Array {
  const picture = square(video, video.videoWidth, video.videoHeight, SIDE);
  return values(square(picture, SIDE, SIDE, size));
}
