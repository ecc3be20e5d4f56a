// Images for messages, as data URLs: from chosen files, the clipboard or a drop.

const TYPES = ['image/png', 'image/jpeg', 'image/webp', 'image/gif', 'image/bmp'];

/** For the attribute `accept` of an input. */
export const ACCEPTED = TYPES.join(',');

/** Whether a model can be given images. @param {{architecture?: object} | undefined} model */
export function takesImages(model) {
  return Boolean(model?.architecture?.input_modalities?.includes('image'));
}

/** The images among some files. @param {Iterable<File>} files */
export function imagesAmong(files) {
  return [...files].filter((file) => TYPES.includes(file.type));
}

/** A file as a data URL. @param {File} file @returns {Promise<string>} */
export function dataUrlOf(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
