
// ── Keys of the viewer ─────────────────────────────────────────────────────────────────────────────
const lines = [...document.querySelectorAll('tr[data-row]')];
let marked = -1;
function mark(at) {
  if (!lines.length) return;
  if (marked >= 0) lines[marked].classList.remove('current');
  marked = Math.min(Math.max(at, 0), lines.length - 1);
  lines[marked].classList.add('current');
  lines[marked].scrollIntoView({block: 'nearest'});
}
function follow(rel) {
  const link = document.querySelector(`a[rel=${rel}]:not([aria-disabled])`);
  if (link) link.click();
}
addEventListener('keydown', event => {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest('input, select, textarea, .tokens')) return;
  if (event.key === '/') { document.getElementById('search')?.focus(); event.preventDefault(); }
  else if (event.key === 'j') lines.length ? mark(marked + 1) : follow('next');
  else if (event.key === 'k') lines.length ? mark(marked - 1) : follow('prev');
  else if (event.key === 'Enter' && marked >= 0 && event.target === document.body) lines[marked].querySelector('a')?.click();
  else if (event.key === '?') document.getElementById('help').showModal();
});
