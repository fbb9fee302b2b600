"""A key and its secrets are two things, so that a secret can be rotated; the audit log knows whose things it tells of."""

import django.db.models.deletion
from django.conf import settings
from django.db import migrations, models


def move_secrets(apps, schema_editor):
    """Each key keeps the secret it has. No process needs to be told: what they know of it stays true."""
    ApiKey = apps.get_model("tenants", "ApiKey")
    KeySecret = apps.get_model("tenants", "KeySecret")
    for key in ApiKey.objects.iterator():
        secret = KeySecret.objects.create(
            key=key,
            lookup=key.lookup,
            digest=key.digest,
            pepper_version=key.pepper_version,
            last_used_at=key.last_used_at,
        )
        KeySecret.objects.filter(pk=secret.pk).update(created_at=key.created_at)


class Migration(migrations.Migration):

    dependencies = [
        migrations.swappable_dependency(settings.AUTH_USER_MODEL),
        ("tenants", "0004_budgets"),
    ]

    operations = [
        migrations.AddField(
            model_name="apikey",
            name="owner",
            field=models.ForeignKey(
                blank=True,
                null=True,
                on_delete=django.db.models.deletion.SET_NULL,
                related_name="api_keys",
                to=settings.AUTH_USER_MODEL,
            ),
        ),
        migrations.AddField(
            model_name="auditevent",
            name="tenant_id",
            field=models.CharField(blank=True, default="", max_length=32),
        ),
        migrations.AddIndex(
            model_name="auditevent",
            index=models.Index(fields=["tenant_id", "id"], name="audit_tenant"),
        ),
        migrations.CreateModel(
            name="KeySecret",
            fields=[
                ("id", models.BigAutoField(auto_created=True, primary_key=True, serialize=False, verbose_name="ID")),
                ("lookup", models.CharField(editable=False, max_length=32, unique=True)),
                ("digest", models.CharField(editable=False, max_length=64)),
                ("pepper_version", models.PositiveSmallIntegerField(editable=False)),
                ("created_at", models.DateTimeField(auto_now_add=True)),
                ("valid_until", models.DateTimeField(blank=True, null=True)),
                ("last_used_at", models.DateTimeField(blank=True, editable=False, null=True)),
                (
                    "key",
                    models.ForeignKey(
                        on_delete=django.db.models.deletion.CASCADE, related_name="secrets", to="tenants.apikey"
                    ),
                ),
            ],
            options={"ordering": ["-id"]},
        ),
        migrations.RunPython(move_secrets),
    ]
