"""The database itself refuses to change and to remove rows of the ledger, adjustments and the audit log.

One way leads past: while the row of `Retention` says `removing`, which it does inside the transaction of a batch only,
rows of the ledger that arrived before its `kept_since` can go. Nothing else can.
"""

from django.db import migrations

LEDGER, RETENTION = "tenants_usagerecord", "tenants_retention"
FOR_GOOD = ("tenants_adjustment", "tenants_auditevent")

RELEASED = f"EXISTS (SELECT 1 FROM {RETENTION} WHERE removing AND OLD.arrived_at < kept_since)"

FUNCTIONS = f"""
CREATE FUNCTION tenants_append_only() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'rows of % are never changed or removed', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END $$;
CREATE FUNCTION tenants_removed_by_retention() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF {RELEASED} THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'rows of % are removed by retention only', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END $$;
"""


def install(apps, schema_editor):
    execute = schema_editor.execute
    if schema_editor.connection.vendor == "postgresql":
        execute(FUNCTIONS, params=None)
        for table in (LEDGER, *FOR_GOOD):
            row_events = "UPDATE" if table == LEDGER else "UPDATE OR DELETE"
            for name, event, each, function in (
                ("stays", row_events, "ROW", "tenants_append_only"),
                ("is_not_emptied", "TRUNCATE", "STATEMENT", "tenants_append_only"),
            ):
                execute(
                    f"CREATE TRIGGER {table}_{name} BEFORE {event} ON {table} "
                    f"FOR EACH {each} EXECUTE FUNCTION {function}()",
                    params=None,
                )
        execute(
            f"CREATE TRIGGER {LEDGER}_is_kept BEFORE DELETE ON {LEDGER} "
            "FOR EACH ROW EXECUTE FUNCTION tenants_removed_by_retention()",
            params=None,
        )
        return
    for table in (LEDGER, *FOR_GOOD):
        refuse = f"BEGIN SELECT RAISE(ABORT, 'rows of {table} are never changed or removed'); END"
        execute(f"CREATE TRIGGER {table}_stays BEFORE UPDATE ON {table} {refuse}", params=None)
        unless = f"WHEN NOT {RELEASED}" if table == LEDGER else ""
        execute(f"CREATE TRIGGER {table}_is_kept BEFORE DELETE ON {table} {unless} {refuse}", params=None)


def remove(apps, schema_editor):
    execute = schema_editor.execute
    if schema_editor.connection.vendor == "postgresql":
        execute(
            "DROP FUNCTION tenants_append_only() CASCADE; DROP FUNCTION tenants_removed_by_retention() CASCADE;",
            params=None,
        )
        return
    for table in (LEDGER, *FOR_GOOD):
        for name in ("stays", "is_kept"):
            execute(f"DROP TRIGGER {table}_{name}", params=None)


class Migration(migrations.Migration):

    dependencies = [("tenants", "0008_adjustments")]

    operations = [migrations.RunPython(install, remove)]
