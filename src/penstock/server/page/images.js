// Images of a message: chosen, dropped or pasted, as data URLs, scaled down where they are large.

const MAX_IMAGES = 8;
const MAX_SIDE = 2048;
const KEPT_TYPES = new Set(["image/png", "image/jpeg", "image/webp"]);
const MAX_KEPT_BYTES = 1_000_000;

/** The images of a paste or a drop. */
export const imageFiles = (transfer) => [...(transfer?.files ?? [])].filter((file) => file.type.startsWith("image/"));

/** Adds files to a message's images. Throws an Error that names a file that is no image. */
export async function withImages(images, files) {
  const added = await Promise.all(files.slice(0, MAX_IMAGES - images.length).map(dataUrl));
  return [...images, ...added];
}

async function dataUrl(file) {
  let bitmap;
  try {
    bitmap = await createImageBitmap(file);
  } catch {
    throw new Error(`${file.name} is no image that this browser can read.`);
  }
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && KEPT_TYPES.has(file.type) && file.size <= MAX_KEPT_BYTES) return readAsUrl(file);
  const canvas = document.createElement("canvas");
  canvas.width = Math.round(bitmap.width * scale);
  canvas.height = Math.round(bitmap.height * scale);
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function readAsUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
