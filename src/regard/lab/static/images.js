// Images as the address can hold them: drawn examples by name, and dropped ones as a small WebP.
import { html } from "/components/dom.js";

const LARGEST = 384, QUALITY = 0.85;

export const SAMPLES = {
  shapes(pen, size) {
    const sky = pen.createLinearGradient(0, 0, 0, size);
    sky.addColorStop(0, "#bcd7ee");
    sky.addColorStop(1, "#f6efe0");
    pen.fillStyle = sky;
    pen.fillRect(0, 0, size, size);
    pen.fillStyle = "#6f9a5b";
    pen.fillRect(0, size * 0.7, size, size * 0.3);
    pen.fillStyle = "#c86b4a";
    pen.fillRect(size * 0.2, size * 0.42, size * 0.36, size * 0.34);
    pen.fillStyle = "#6d3b2e";
    pen.beginPath();
    pen.moveTo(size * 0.14, size * 0.44);
    pen.lineTo(size * 0.38, size * 0.2);
    pen.lineTo(size * 0.62, size * 0.44);
    pen.fill();
    pen.fillStyle = "#f7e08b";
    pen.beginPath();
    pen.arc(size * 0.8, size * 0.2, size * 0.09, 0, 7);
    pen.fill();
    pen.fillStyle = "#31506b";
    pen.fillRect(size * 0.27, size * 0.5, size * 0.1, size * 0.12);
    pen.fillRect(size * 0.43, size * 0.56, size * 0.08, size * 0.2);
  },
  digit(pen, size) {
    pen.fillStyle = "#000";
    pen.fillRect(0, 0, size, size);
    pen.strokeStyle = "#fff";
    pen.lineWidth = size * 0.1;
    pen.lineCap = "round";
    pen.lineJoin = "round";
    pen.beginPath();
    pen.moveTo(size * 0.3, size * 0.25);
    pen.lineTo(size * 0.7, size * 0.25);
    pen.lineTo(size * 0.45, size * 0.8);
    pen.stroke();
  },
};

export function drawSample(name, size = 224) {
  const canvas = html("canvas", { width: size, height: size });
  SAMPLES[name](canvas.getContext("2d"), size);
  return canvas.toDataURL("image/png");
}

// An image file as a data address of moderate length; what is no image is refused by the browser's decoder.
export async function shrinkImage(file, size) {
  const bitmap = await createImageBitmap(file), share = Math.min(1, Math.max(size || 0, 64, LARGEST) / Math.max(bitmap.width, bitmap.height));
  const canvas = html("canvas", { width: Math.max(1, Math.round(bitmap.width * share)), height: Math.max(1, Math.round(bitmap.height * share)) });
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  bitmap.close();
  return canvas.toDataURL("image/webp", QUALITY);
}

export function dataToBlob(address) {
  const [head, body] = address.split(","), raw = atob(body);
  return new Blob([Uint8Array.from(raw, (letter) => letter.charCodeAt(0))], { type: head.slice(5, head.indexOf(";")) });
}

// What the address says of an image: the name of a drawn one, or the data itself.
export function imageOf(text) {
  if (!text) return null;
  if (SAMPLES[text]) return drawSample(text);
  return text.startsWith("data:image/") ? text : null;
}
