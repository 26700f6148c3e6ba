// The part of the address after #: the view and what it shows, so that an address restores a view.
let pending = null;

export function readAddress() {
  const [view, query = ""] = location.hash.slice(1).split("?");
  return { view: view || "look", params: Object.fromEntries(new URLSearchParams(query)) };
}

export function formatAddress(view, params) {
  const kept = Object.entries(params).filter(([, value]) => value !== null && value !== undefined && value !== "");
  const query = new URLSearchParams(kept.map(([name, value]) => [name, String(value)])).toString();
  return `#${view}${query ? `?${query}` : ""}`;
}

// Written a moment later: a moved slider would otherwise fill the browser's history.
export function writeAddress(view, params) {
  clearTimeout(pending);
  pending = setTimeout(() => {
    const hash = formatAddress(view, params);
    if (hash !== location.hash) history.replaceState(null, "", location.pathname + location.search + hash);
    const link = document.querySelector(`nav [data-view="${view}"]`);
    if (link) link.setAttribute("href", hash);
  }, 150);
}
