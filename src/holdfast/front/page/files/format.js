// Numbers as people read them.

const WHOLE = new Intl.NumberFormat('en');
const UNITS = ['bytes', 'KiB', 'MiB', 'GiB', 'TiB'];

/** @param {number} value */
export function count(value) {
  return WHOLE.format(Math.round(value));
}

/** @param {number} value */
export function bytes(value) {
  let unit = 0;
  while (value >= 1024 && unit < UNITS.length - 1) {
    value /= 1024;
    unit += 1;
  }
  return `${unit === 0 ? value : value.toFixed(1)} ${UNITS[unit]}`;
}

/** @param {number} value */
export function seconds(value) {
  if (value < 0.0995) return `${(value * 1000).toFixed(value < 0.00995 ? 1 : 0)} ms`;
  if (value < 99.5) return `${value.toFixed(value < 9.95 ? 2 : 1)} s`;
  const minutes = Math.floor(value / 60);
  if (minutes < 100) return `${minutes} min ${Math.round(value % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} days`;
}

/** @param {number} part @param {number} whole */
export function percent(part, whole) {
  return whole ? `${Math.round((100 * part) / whole)} %` : '';
}

/** The time of day, also with seconds. @param {Date} at */
export function clockOf(at, hasSeconds = false) {
  const parts = [at.getHours(), at.getMinutes(), ...(hasSeconds ? [at.getSeconds()] : [])];
  return parts.map((part) => String(part).padStart(2, '0')).join(':');
}

/** How long ago a time is. @param {number} unixSeconds */
export function ago(unixSeconds) {
  const passed = Math.max(0, Date.now() / 1000 - unixSeconds);
  return passed < 99.5 ? `${Math.round(passed)} s ago` : `${seconds(passed)} ago`;
}

/** @param {number} value @param {string} singular @param {string} plural */
export function counted(value, singular, plural = `${singular}s`) {
  return `${count(value)} ${value === 1 ? singular : plural}`;
}
