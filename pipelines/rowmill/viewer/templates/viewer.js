
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
  else if (event.key === 'e') (lines[marked] ?? document).querySelector('.leave-out')?.click();
  else if (event.key === '?') document.getElementById('help').showModal();
});

// ── Rows to leave out: kept in this browser until they are handed over as a file ────────────────────
const storage = `rowmill-left-out-${document.body.dataset.recipe}`;
const boxes = [...document.querySelectorAll('.leave-out')];
let chosen = JSON.parse(localStorage.getItem(storage) ?? '{}');
function showSelection() {
  const panel = document.getElementById('selection'), entries = Object.values(chosen);
  panel.hidden = !entries.length;
  panel.querySelector('b').textContent = `${entries.length} ${entries.length === 1 ? 'row' : 'rows'} to leave out`;
  const text = entries.map(entry => JSON.stringify(entry) + '\n').join('');
  document.getElementById('hand-over').href = URL.createObjectURL(new Blob([text], {type: 'application/jsonl'}));
  for (const box of boxes) {
    box.checked = box.value in chosen;
    box.closest('tr, article').classList.toggle('selected', box.checked);
  }
}
function keep(entries) {
  chosen = entries;
  localStorage.setItem(storage, JSON.stringify(chosen));
  showSelection();
}
for (const box of boxes) box.addEventListener('change', async () => {
  const {[box.value]: before, ...others} = chosen;
  if (!box.checked) return keep(others);
  const [path, query] = document.body.dataset.select.split('?');
  const answer = await fetch(`${path}?${new URLSearchParams({row: box.value})}${query ? `&${query}` : ''}`);
  if (answer.ok) keep({...chosen, [box.value]: {...await answer.json(), note: document.getElementById('note').value}});
  else box.checked = false;
});
document.getElementById('note').addEventListener('change', event => keep(Object.fromEntries(
  Object.entries(chosen).map(([row, entry]) => [row, {...entry, note: entry.note || event.target.value}]))));
document.getElementById('forget').addEventListener('click', () => keep({}));
if (document.body.dataset.recipe) showSelection();
