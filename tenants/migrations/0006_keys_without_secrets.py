"""What moved to KeySecret goes. On its own, because PostgreSQL does not alter a table with rows still to be checked."""

from django.db import migrations


class Migration(migrations.Migration):

    dependencies = [("tenants", "0005_key_secrets")]

    operations = [
        migrations.RemoveField(model_name="apikey", name="digest"),
        migrations.RemoveField(model_name="apikey", name="last_used_at"),
        migrations.RemoveField(model_name="apikey", name="lookup"),
        migrations.RemoveField(model_name="apikey", name="pepper_version"),
    ]
