"""SQLite's REPLACE removes the row in its way without asking the triggers of DELETE: what stands for good refuses it.

A row that is in the way of another is refused whatever the statement would have done about it, so that OR IGNORE is an
error too. PostgreSQL has no such statement; its ON CONFLICT DO UPDATE is an UPDATE to triggers, as it is on SQLite.
"""

from django.db import migrations

BY_ID = "id = NEW.id"
IN_THE_WAY = {
    "tenants_usagerecord": (BY_ID, "request_id = NEW.request_id AND attempt = NEW.attempt"),
    "tenants_adjustment": (BY_ID,),
    "tenants_auditevent": (BY_ID,),
}


def install(apps, schema_editor):
    if schema_editor.connection.vendor != "sqlite":
        return
    for table, conditions in IN_THE_WAY.items():
        found = " OR ".join(f"EXISTS (SELECT 1 FROM {table} WHERE {condition})" for condition in conditions)
        schema_editor.execute(
            f"CREATE TRIGGER {table}_is_not_replaced BEFORE INSERT ON {table} WHEN {found} "
            f"BEGIN SELECT RAISE(ABORT, 'rows of {table} are never changed or removed'); END",
            params=None,
        )


def remove(apps, schema_editor):
    if schema_editor.connection.vendor == "sqlite":
        for table in IN_THE_WAY:
            schema_editor.execute(f"DROP TRIGGER {table}_is_not_replaced", params=None)


class Migration(migrations.Migration):

    dependencies = [("tenants", "0010_own_deadline")]

    operations = [migrations.RunPython(install, remove)]
