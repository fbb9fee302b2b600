// Numbers as people read them; `templatetags/figures.py` does the same for the first byte.

const UNKNOWN = "–";

export function count(value) {
  if (value === null || value === undefined) return UNKNOWN;
  for (const [limit, unit] of [[1e6, " M"], [1e3, " k"]]) {
    if (value >= limit) return (value / limit).toFixed(1) + unit;
  }
  return value !== Math.trunc(value) && value < 10 ? value.toFixed(1) : value.toFixed(0);
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds > 0 && seconds < 1) return `${(seconds * 1000).toFixed(0)} ms`;
  if (seconds < 60) return seconds ? `${seconds.toFixed(1)} s` : "0 s";
  return `${Math.floor(seconds / 60)} min ${Math.floor(seconds % 60)} s`;
}

export function wholeSeconds(seconds) {
  return seconds < 60 ? `${Math.floor(seconds)} s` : duration(seconds);
}

export function percent(share) {
  if (share === null || share === undefined) return UNKNOWN;
  return `${(share * 100).toFixed(1).replace(/\.0$/, "")} %`;
}

// Local wall-clock time, as Plotly's date axes take it.
export function localTime(unixSeconds) {
  const at = new Date(unixSeconds * 1000);
  const pad = (number, width = 2) => String(number).padStart(width, "0");
  const day = `${at.getFullYear()}-${pad(at.getMonth() + 1)}-${pad(at.getDate())}`;
  return `${day} ${pad(at.getHours())}:${pad(at.getMinutes())}:${pad(at.getSeconds())}.${pad(at.getMilliseconds(), 3)}`;
}

export function clockTime(unixSeconds) {
  return localTime(unixSeconds).slice(11, 19);
}

export function zoneLabel() {
  const minutes = -new Date().getTimezoneOffset();
  const sign = minutes < 0 ? "-" : "+";
  const hours = String(Math.floor(Math.abs(minutes) / 60)).padStart(2, "0");
  const rest = String(Math.abs(minutes) % 60).padStart(2, "0");
  return `${Intl.DateTimeFormat().resolvedOptions().timeZone} (UTC${sign}${hours}:${rest})`;
}
