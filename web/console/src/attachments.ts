/** Files and images of a message. */

import { type PartJson } from "@pawl/client";
import { signal } from "@preact/signals";

import { may, pawl, who } from "./state";

export interface Attachment {
  name: string;
  /** A picture as a data URL, or the text of a file. */
  picture?: string;
  text?: string;
}

const PICTURE = /^image\/(png|jpeg|gif|webp)$/;
const TEXT = /^text\/|json|xml|yaml|javascript|csv/;
const TEXT_NAME = /\.(md|txt|csv|json|ya?ml|toml|py|ts|tsx|js|go|rs|java|sql|sh|log|xml|html|css)$/i;
/** A message has at most 1 MiB of images and 256 KiB of text. */
const PICTURE_BYTES_MAX = 700_000;
const TEXT_BYTES_MAX = 1_000_000;
const SIDE_MAX = 1600;

const accepts = (kind: string): boolean => who.value?.deployment?.partKinds?.includes(kind) ?? false;
export const mayAttach = (): boolean => accepts("image") || may("tool.v1.DocumentService/PutDocument");

/** Pictures that this window has sent, by their SHA-256: Pawl does not return the bytes of an image. */
export const pictures = signal<Readonly<Record<string, string>>>({});

export async function attachmentOf(file: File): Promise<Attachment> {
  const name = file.name || "image";
  if (PICTURE.test(file.type)) {
    if (!accepts("image")) throw new Error("The models of this deployment do not accept images.");
    return { name, picture: file.size > PICTURE_BYTES_MAX ? await smaller(file) : await dataUrl(file) };
  }
  if (!TEXT.test(file.type) && !TEXT_NAME.test(name)) throw new Error(`${name} is neither an image (PNG, JPEG, GIF, WebP) nor a text.`);
  if (file.size > TEXT_BYTES_MAX) throw new Error(`${name} has ${file.size} bytes. A file may have at most ${TEXT_BYTES_MAX}.`);
  return { name, text: await file.text() };
}

function dataUrl(file: Blob): Promise<string> {
  return new Promise((done, failed) => {
    const reader = new FileReader();
    reader.onload = () => done(String(reader.result));
    reader.onerror = () => failed(new Error("The file could not be read."));
    reader.readAsDataURL(file);
  });
}

async function smaller(file: Blob): Promise<string> {
  const image = await createImageBitmap(file);
  const scale = Math.min(1, SIDE_MAX / Math.max(image.width, image.height));
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.round(image.width * scale), Math.round(image.height * scale)];
  canvas.getContext("2d")!.drawImage(image, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.82);
}

/** Stores the files as documents, and returns the parts of the message. */
export async function partsOf(attachments: Attachment[]): Promise<PartJson[]> {
  const parts: PartJson[] = [];
  for (const { name, picture, text } of attachments) {
    if (picture !== undefined) {
      const data = picture.slice(picture.indexOf(",") + 1);
      await remember(picture, data);
      parts.push({ image: { data, mediaType: picture.slice(5, picture.indexOf(";")) } });
    } else {
      // A document with a name of its own replaces no other one.
      const documentName = `uploads/${new Date().toISOString().slice(0, 19).replaceAll(":", ".")} ${name}`.slice(0, 200);
      await pawl.documents.putDocument({ name: documentName, text: text ?? "" });
      parts.push({ file: { documentName } });
    }
  }
  return parts;
}

async function remember(picture: string, data: string): Promise<void> {
  const bytes = Uint8Array.from(atob(data), (each) => each.charCodeAt(0));
  const digest = await globalThis.crypto.subtle?.digest("SHA-256", bytes);
  if (digest) pictures.value = { ...pictures.value, [[...new Uint8Array(digest)].map((byte) => byte.toString(16).padStart(2, "0")).join("")]: picture };
}
