// On every page: the small components (Alpine, CSP build) and the theme, which the server announces by an event.

document.addEventListener("alpine:init", () => {
  window.Alpine.data("menu", () => ({
    open: false,
    get expanded() {
      return String(this.open);
    },
    toggle() {
      this.open = !this.open;
    },
    close() {
      this.open = false;
    },
    dismiss() {
      if (this.open) this.$refs.opener.focus();
      this.open = false;
    },
  }));

  window.Alpine.data("panel", () => ({
    table: false,
    get chart() {
      return !this.table;
    },
    get pressed() {
      return String(this.table);
    },
    toggle() {
      this.table = !this.table;
      this.$nextTick(() => this.$dispatch("harness:panel"));
    },
  }));
});

document.addEventListener("harness:theme", (event) => {
  const { theme } = event.detail;
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  for (const button of document.querySelectorAll('button[name="theme"]')) {
    button.setAttribute("aria-pressed", String(button.value === theme));
  }
});
